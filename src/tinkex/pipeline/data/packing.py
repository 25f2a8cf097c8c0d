"""Which documents a sequence holds and in which order sequences come: pure functions of the seed.

A document of n tokens teaches n - 1 predictions: its first token is never predicted, its last
never looked at. All lengths here count predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Indices: TypeAlias = npt.NDArray[np.int64]
#: Keeps the uses of one seed apart.
_PACKING, _ORDER, _HELD_OUT = 1, 2, 3


class DocumentPieces(NamedTuple):
    """Stretches of the token file, none longer than a sequence."""

    starts: Indices
    lengths: Indices


def truncate_documents(starts: Indices, documents: Indices, max_length: int) -> DocumentPieces:
    """A piece per document, its end cut off if it is too long."""
    lengths = np.minimum(starts[documents + 1] - starts[documents] - 1, max_length)
    return DocumentPieces(starts[documents], lengths)


def split_documents(starts: Indices, documents: Indices, max_length: int) -> DocumentPieces:
    """As many pieces per document as it takes; where one ends, the next goes on."""
    lengths = starts[documents + 1] - starts[documents] - 1
    num_pieces = -(-lengths // max_length)
    owner = np.repeat(np.arange(len(documents)), num_pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    offset = number * max_length
    return DocumentPieces(
        starts[documents][owner] + offset, np.minimum(lengths[owner] - offset, max_length)
    )


def pack_sequences(lengths: Sequence[int] | Indices, capacity: int, seed: int) -> list[Indices]:
    """Pieces by the sequence that holds them: each goes where the least room is left over.

    They are looked at in an order drawn from the seed, so that a sequence holds a bit of all.
    """
    order = _rng(seed, _PACKING).permutation(len(lengths))
    members: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    has_room = 0  # bit r is set if some sequence has room for exactly r
    for piece in order.tolist():
        length = int(lengths[piece])
        fitting = has_room >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sequence = by_room[room].pop()
            has_room ^= 0 if by_room[room] else 1 << room
        else:
            room, sequence = capacity, len(members)
            members.append([])
        members[sequence].append(piece)
        by_room[room - length].append(sequence)
        has_room |= 1 << (room - length)
    return [np.asarray(found, dtype=np.int64) for found in members]


def shuffled_order(num_items: int, seed: int, epoch: int) -> Indices:
    """The order of an epoch."""
    return _rng(seed, _ORDER, epoch).permutation(num_items)


def split_held_out(
    digests: npt.NDArray[np.uint64], num_wanted: int, seed: int, is_useful: npt.NDArray[np.bool_]
) -> tuple[Indices, Indices]:
    """Rows to train on, and useful rows to evaluate on: at most a tenth of them, at least one.

    A row that is a copy of one held out is in neither.
    """
    order = _rng(seed, _HELD_OUT).permutation(len(digests))
    order = order[is_useful[order]]
    held = np.sort(order[: min(num_wanted, max(1, len(order) // 10))])
    is_copy = np.isin(digests, digests[held])
    return np.flatnonzero(~is_copy), held


def _rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
