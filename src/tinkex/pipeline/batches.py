"""Batches of a token file: packed documents without padding, addressed by epoch and index.

Shape letters: T tokens of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.pipeline.token_file import (
    DocumentPieces,
    Indices,
    TokenFile,
    pack_sequences,
    shuffled_order,
    split_documents,
    truncate_documents,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Concatenated documents; attention does not cross their boundaries."""

    tokens_T: Tensor
    targets_T: Tensor
    """The next token at each position."""
    loss_mask_T: Tensor
    """True where the target contributes to the loss."""
    lengths: tuple[int, ...]
    """Lengths of the documents."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens; there is no padding."""
        return len(self.tokens_T)

    @property
    def num_samples(self) -> int:
        """Number of documents."""
        return len(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch:
    """Pairs of documents, chosen and rejected in alternation."""

    token_batch: TokenBatch

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.token_batch.num_tokens

    @property
    def num_samples(self) -> int:
        """Number of pairs."""
        return self.token_batch.num_samples // 2


class PackedSource:
    """Documents packed into sequences of at most `max_length` tokens.

    With `split_long`, a longer document continues in another sequence; otherwise it is truncated.
    """

    def __init__(
        self,
        file: TokenFile,
        rows: Indices,
        *,
        max_length: int,
        batch_size: int,
        seed: int,
        split_long: bool,
    ) -> None:
        self._file, self._batch_size, self._seed = file, batch_size, seed
        pieces = (split_documents if split_long else truncate_documents)(
            file.starts, rows, max_length
        )
        is_useful = _has_targets(file, pieces)
        self._pieces = DocumentPieces(pieces.starts[is_useful], pieces.lengths[is_useful])
        self.num_dropped = int(len(is_useful) - is_useful.sum())
        """Number of documents without targets in their first `max_length` tokens."""
        self.num_shortened = 0 if split_long else _count_longer(file, rows, max_length)
        """Number of truncated documents."""
        self._sequences = pack_sequences(self._pieces.lengths, max_length, seed)
        self._order: tuple[int, Indices] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens per epoch."""
        return int(self._pieces.lengths.sum())

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches per epoch; the last one may be smaller."""
        return -(-len(self._sequences) // self._batch_size)

    def batch(self, epoch: int, index: int) -> TokenBatch:
        """Return a batch of an epoch."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, shuffled_order(len(self._sequences), self._seed, epoch))
        chosen = self._order[1][index * self._batch_size : (index + 1) * self._batch_size]
        members = np.concatenate([self._sequences[number] for number in chosen])
        # Attention processes neighbours of equal length together.
        members = members[np.argsort(-self._pieces.lengths[members], kind="stable")]
        return gather_batch(self._file, self._pieces, members)


class PairSource:
    """Pairs of documents, each truncated to `max_length` tokens."""

    def __init__(
        self, file: TokenFile, rows: Indices, *, max_length: int, batch_size: int, seed: int
    ) -> None:
        self._file, self._batch_size, self._seed = file, batch_size, seed
        documents = (2 * rows[:, None] + np.arange(2)).reshape(-1)
        pieces = truncate_documents(file.starts, documents, max_length)
        is_useful = np.asarray(_has_targets(file, pieces).reshape(-1, 2).all(axis=1))
        selected = np.repeat(is_useful, 2)
        self._pieces = DocumentPieces(pieces.starts[selected], pieces.lengths[selected])
        self.num_dropped = int(len(is_useful) - is_useful.sum())
        """Number of pairs with an answer that starts after `max_length` tokens."""
        self.num_shortened = _count_longer(file, documents, max_length)
        """Number of truncated answers."""
        self._num_pairs = int(is_useful.sum())
        self._order: tuple[int, Indices] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens per epoch."""
        return int(self._pieces.lengths.sum())

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches per epoch; the last one may be smaller."""
        return -(-self._num_pairs // self._batch_size)

    def batch(self, epoch: int, index: int) -> PairBatch:
        """Return a batch of an epoch."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, shuffled_order(self._num_pairs, self._seed, epoch))
        chosen = self._order[1][index * self._batch_size : (index + 1) * self._batch_size]
        members = (2 * chosen[:, None] + np.arange(2)).reshape(-1)
        return PairBatch(token_batch=gather_batch(self._file, self._pieces, members))


def gather_batch(file: TokenFile, pieces: DocumentPieces, members: Indices) -> TokenBatch:
    """Concatenate pieces of the file into a batch."""
    starts, lengths = pieces.starts[members], pieces.lengths[members]
    ends = np.cumsum(lengths)
    at_T = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    return TokenBatch(
        tokens_T=torch.from_numpy(file.tokens[at_T].astype(np.int64)),
        targets_T=torch.from_numpy(file.tokens[at_T + 1].astype(np.int64)),
        loss_mask_T=torch.from_numpy(file.learned[at_T + 1].astype(np.bool_)),
        lengths=tuple(lengths.tolist()),
    )


def find_trainable_rows(file: TokenFile, max_length: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows with targets in their first `max_length` tokens.

    Both answers of a pair must have targets; plain text always has them.
    """
    documents = np.arange(len(file.starts) - 1)
    is_useful = _has_targets(file, truncate_documents(file.starts, documents, max_length))
    return np.asarray(is_useful.reshape(-1, file.documents_per_row).all(axis=1))


def _count_longer(file: TokenFile, documents: Indices, max_length: int) -> int:
    """Count the documents that are longer than a sequence."""
    return int((file.starts[documents + 1] - file.starts[documents] - 1 > max_length).sum())


def _has_targets(file: TokenFile, pieces: DocumentPieces) -> npt.NDArray[np.bool_]:
    """Return a mask of the pieces with at least one target, without per-token memory."""
    if not len(pieces.starts):
        return np.zeros(0, np.bool_)
    last = len(file.learned) - 1
    firsts = pieces.starts + 1
    ends = firsts + pieces.lengths
    edges = np.minimum(np.stack([firsts, ends], axis=1).reshape(-1), last)
    # reduceat reduces from each edge to the next; [::2] skips the gaps between pieces.
    result = np.maximum.reduceat(file.learned, edges)[::2]
    # Edges cannot exceed the last token, so check it separately.
    result |= np.where(ends > last, file.learned[last], 0).astype(np.uint8)
    return (result > 0) & (pieces.lengths > 0)
