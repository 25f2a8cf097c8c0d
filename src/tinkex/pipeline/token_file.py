"""Tokenized data files, and how their documents are packed, shuffled and split.

A document of n tokens has n - 1 predictions. Lengths of pieces and sequences count predictions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tinkex.data.chatml import render_spans
from tinkex.data.jsonl import JsonlLine, digest_file, parse_line, read_lines
from tinkex.data.rows import STAGE_PARSERS, ChatRow, StageRow, TextRow
from tinkex.errors import InvalidInput
from tinkex.pipeline.tokenizer import TextTokenizer
from tinkex.system.atomic import new_directory, remove_directory

Indices: TypeAlias = npt.NDArray[np.int64]
#: Mixed into the seed to get independent random streams.
_PACKING, _ORDER, _HELD_OUT = 1, 2, 3


class DocumentPieces(NamedTuple):
    """Ranges of the token file, none longer than a sequence."""

    starts: Indices
    lengths: Indices


def truncate_documents(starts: Indices, documents: Indices, max_length: int) -> DocumentPieces:
    """Return one piece per document, truncated to `max_length`."""
    lengths = np.minimum(starts[documents + 1] - starts[documents] - 1, max_length)
    return DocumentPieces(starts[documents], lengths)


def split_documents(starts: Indices, documents: Indices, max_length: int) -> DocumentPieces:
    """Split each document into consecutive pieces of at most `max_length`."""
    lengths = starts[documents + 1] - starts[documents] - 1
    num_pieces = -(-lengths // max_length)
    owner = np.repeat(np.arange(len(documents)), num_pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    offset = number * max_length
    return DocumentPieces(
        starts[documents][owner] + offset, np.minimum(lengths[owner] - offset, max_length)
    )


def pack_sequences(lengths: Sequence[int] | Indices, capacity: int, seed: int) -> list[Indices]:
    """Pack pieces into sequences (best fit) and return the pieces of each sequence.

    Pieces are visited in random order, so that a sequence mixes parts of the whole file.
    """
    order = _rng(seed, _PACKING).permutation(len(lengths))
    members: list[list[int]] = []
    by_free_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    has_free_space = 0  # bit n is set if some sequence has exactly n free tokens
    for piece in order.tolist():
        length = int(lengths[piece])
        fitting = has_free_space >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            sequence = by_free_space[free].pop()
            has_free_space ^= 0 if by_free_space[free] else 1 << free
        else:
            free, sequence = capacity, len(members)
            members.append([])
        members[sequence].append(piece)
        by_free_space[free - length].append(sequence)
        has_free_space |= 1 << (free - length)
    return [np.asarray(pieces, dtype=np.int64) for pieces in members]


def shuffled_order(num_items: int, seed: int, epoch: int) -> Indices:
    """Return the random order of an epoch."""
    return _rng(seed, _ORDER, epoch).permutation(num_items)


def split_held_out(
    digests: npt.NDArray[np.uint64], num_wanted: int, seed: int, is_useful: npt.NDArray[np.bool_]
) -> tuple[Indices, Indices]:
    """Return training rows and held-out rows: at most a tenth of the useful ones, at least one.

    Duplicates of held-out rows are in neither.
    """
    order = _rng(seed, _HELD_OUT).permutation(len(digests))
    order = order[is_useful[order]]
    held = np.sort(order[: min(num_wanted, max(1, len(order) // 10))])
    is_copy = np.isin(digests, digests[held])
    return np.flatnonzero(~is_copy), held


def _rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


#: Increase when the file format or the tokenization changes.
_VERSION = 1
_META_FILE = "meta.json"
_ROWS_PER_BATCH = 512


class Document(NamedTuple):
    """Token ids of a text or conversation, and which of them are targets."""

    ids: list[int]
    learned: list[bool]


class TokenFile:
    """Memory-mapped token file of a data file."""

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / _META_FILE).read_bytes())
        self.digest: str = meta["digest"]
        """Digest of the data, the tokenizer and the settings."""
        self.num_rows: int = meta["num_rows"]
        self.documents_per_row: int = meta["documents_per_row"]
        self.tokens = _memmap(folder / "tokens.bin", np.dtype(meta["dtype"]))
        self.learned = _memmap(folder / "learned.bin", np.dtype(np.uint8))
        self.starts: Indices = _memmap(folder / "starts.bin", np.dtype(np.int64))
        self.row_digests = _memmap(folder / "rows.bin", np.dtype(np.uint64))

    def document(self, number: int) -> Document:
        """Return a copy of one document."""
        start, stop = self.starts[number], self.starts[number + 1]
        return Document(
            self.tokens[start:stop].tolist(), self.learned[start:stop].astype(bool).tolist()
        )


def open_token_file(
    data: Path, tokenizer: TextTokenizer, stage: str, cache: Path, limit: int = 0
) -> TokenFile:
    """Open the token file of a data file; creates it if data or tokenizer changed."""
    key = (_VERSION, stage, limit, digest_file(data), tokenizer.digest)
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    folder = cache / f"{data.stem}-{digest[:16]}"
    if not (folder / _META_FILE).is_file():
        with new_directory(folder) as scratch:
            _write_token_file(scratch, data, tokenizer, stage, limit, digest)
        _remove_stale(folder, data.stem)
    return TokenFile(folder)


def encode_rows(rows: Sequence[StageRow], tokenizer: TextTokenizer) -> Iterator[list[Document]]:
    """Tokenize rows; yields the documents of each."""
    spans = [(span, index) for index, row in enumerate(rows) for span in _row_spans(row)]
    span_ids = tokenizer.encode_batch([text for (text, _, _), _ in spans])
    documents: list[dict[int, Document]] = [{} for _ in rows]
    for ((_, is_learned, side), index), ids in zip(spans, span_ids, strict=True):
        document = documents[index].setdefault(side, Document([], []))
        document.ids.extend(ids)
        document.learned.extend([is_learned] * len(ids))
    for row, by_side in zip(rows, documents, strict=True):
        if isinstance(row, TextRow):
            ids = [*(row.ids or by_side[0].ids), tokenizer.end_of_text]
            yield [Document(ids, [True] * len(ids))]
        else:
            yield [by_side[side] for side in sorted(by_side)]


def _row_spans(row: StageRow) -> Iterator[tuple[str, bool, int]]:
    """Yield the separately tokenized texts of a row: text, whether it is a target, pair side."""
    if isinstance(row, TextRow):
        if not row.ids:
            yield row.text, True, 0
        return
    chats = (row,) if isinstance(row, ChatRow) else (row.chosen, row.rejected)
    for side, chat in enumerate(chats):
        spans = render_spans(chat.messages, chat.tools)
        # The final newline would belong to a next turn.
        last = len(spans) - 1
        for number, span in enumerate(spans):
            text = span.text.removesuffix("\n") if number == last else span.text
            if text:
                yield text, span.is_learned, side


# --- files ----------------------------------------------------------------------------------


def _write_token_file(
    folder: Path, data: Path, tokenizer: TextTokenizer, stage: str, limit: int, digest: str
) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    num_rows, end = 0, 0
    with ExitStack() as stack:
        names = ("tokens.bin", "learned.bin", "starts.bin", "rows.bin")
        files = [stack.enter_context((folder / name).open("wb")) for name in names]
        tokens, learned, starts, rows = files
        _write_array(starts, [0], np.int64)
        for line, documents in _documents(data, tokenizer, stage, limit):
            _write_array(rows, [line.digest], np.uint64)
            num_rows += 1
            for document in documents:
                end += len(document.ids)
                _write_array(tokens, document.ids, dtype)
                _write_array(learned, document.learned, np.uint8)
                _write_array(starts, [end], np.int64)
    meta = {
        "version": _VERSION,
        "digest": digest,
        "num_rows": num_rows,
        "documents_per_row": 2 if stage == "dpo" else 1,
        "dtype": dtype.name,
    }
    (folder / _META_FILE).write_text(json.dumps(meta, indent=2) + "\n")


def _documents(
    data: Path, tokenizer: TextTokenizer, stage: str, limit: int
) -> Iterator[tuple[JsonlLine, list[Document]]]:
    lines = read_lines(data, limit)
    while batch := list(islice(lines, _ROWS_PER_BATCH)):
        rows = [parse_line(data, line, STAGE_PARSERS[stage]) for line in batch]
        for line, documents in zip(batch, encode_rows(rows, tokenizer), strict=True):
            _check_token_ids(data, line, documents, tokenizer.vocab_size)
            yield line, documents


def _check_token_ids(
    data: Path, line: JsonlLine, documents: Sequence[Document], vocab_size: int
) -> None:
    for document in documents:
        if max(document.ids) >= vocab_size:
            raise InvalidInput(
                f"{data}, line {line.number}: token {max(document.ids)} is outside the "
                f"vocabulary of {vocab_size} tokens"
            )


def _write_array(file: BinaryIO, numbers: Sequence[int], dtype: npt.DTypeLike) -> None:
    file.write(np.asarray(numbers, dtype=dtype).tobytes())


ScalarT = TypeVar("ScalarT", bound=np.generic)


def _memmap(path: Path, dtype: np.dtype[ScalarT]) -> npt.NDArray[ScalarT]:
    # numpy cannot map an empty file.
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _remove_stale(folder: Path, stem: str) -> None:
    """Remove token files of older versions of the same data."""
    for other in folder.parent.glob(f"{stem}-" + "[0-9a-f]" * 16):
        if other != folder:
            remove_directory(other)
