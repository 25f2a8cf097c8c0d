"""How one big batch becomes several requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinkex.errors import InvalidInput
from tinkex.types import Datum, EncodedTextChunk

MAX_CHUNK_ITEMS = 1024
MAX_CHUNK_BYTES = 5_000_000
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class DatumChunk:
    """Datums that travel in one request."""

    data: list[Datum]
    num_bytes: int


def split_chunks(
    data: Sequence[Datum],
    max_items: int = MAX_CHUNK_ITEMS,
    max_bytes: int = MAX_CHUNK_BYTES,
) -> list[DatumChunk]:
    """Cut a batch by count and by size; order is kept, no chunk is empty.

    A datum larger than `max_bytes` travels alone.
    """
    if not data:
        raise InvalidInput("No data provided: a batch needs at least one Datum")
    chunks: list[DatumChunk] = []
    current: list[Datum] = []
    current_bytes = 0
    for datum in data:
        size = datum_bytes(datum)
        if current and (len(current) >= max_items or current_bytes + size > max_bytes):
            chunks.append(DatumChunk(current, current_bytes))
            current, current_bytes = [], 0
        current.append(datum)
        current_bytes += size
    chunks.append(DatumChunk(current, current_bytes))
    return chunks


def datum_bytes(datum: Datum) -> int:
    """The size of one datum on the wire, without the few bytes of framing."""
    inputs = sum(input_chunk_bytes(piece) for piece in datum.model_input.chunks)
    # A sparse tensor's indices count too.
    return inputs + sum(tensor.nbytes for tensor in datum.loss_fn_inputs.values())


def input_chunk_bytes(chunk: Any) -> int:
    """The size of one piece of model input: tokens, image, audio or a pointer."""
    if isinstance(chunk, EncodedTextChunk):
        return BYTES_PER_TOKEN * len(chunk.tokens)
    for name in ("data", "dmel", "location"):
        content = getattr(chunk, name, None)
        if content is not None:
            return len(content)
    raise InvalidInput(f"Unsupported model input chunk: {type(chunk).__name__}")
