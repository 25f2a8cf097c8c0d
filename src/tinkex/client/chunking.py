"""Split a batch into chunks, one per request, and merge the chunks' results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinkex.errors import InvalidInput
from tinkex.logs import get_logger
from tinkex.types import Datum, EncodedTextChunk, ForwardBackwardOutput

MAX_CHUNK_ITEMS = 1024
MAX_CHUNK_BYTES = 5_000_000
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class DatumChunk:
    """The datums of one request."""

    data: list[Datum]
    num_bytes: int


def split_chunks(
    data: Sequence[Datum],
    max_items: int = MAX_CHUNK_ITEMS,
    max_bytes: int = MAX_CHUNK_BYTES,
) -> list[DatumChunk]:
    """Split a batch by count and by size; preserves order and creates no empty chunk.

    A datum larger than `max_bytes` gets its own chunk.
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
    """Return the size of one datum on the wire, without framing."""
    inputs = sum(input_chunk_bytes(chunk) for chunk in datum.model_input.chunks)
    # A sparse tensor's indices count too.
    return inputs + sum(tensor.nbytes for tensor in datum.loss_fn_inputs.values())


def input_chunk_bytes(chunk: object) -> int:
    """Return the size of one chunk of model input: tokens, image, audio or a pointer."""
    if isinstance(chunk, EncodedTextChunk):
        return BYTES_PER_TOKEN * len(chunk.tokens)
    for name in ("data", "dmel", "location"):
        content = getattr(chunk, name, None)
        if content is not None:
            return len(content)
    raise InvalidInput(f"Unsupported model input chunk: {type(chunk).__name__}")


# --- merging ----------------------------------------------------------------------------------

logger = get_logger(__name__)

#: `x:unique` has the first value; the others become x:unique_2, x:unique_3 ...
FIRST_EXTRA_UNIQUE = 2
_MASK64 = (1 << 64) - 1

WeightedValues = Sequence[tuple[float, int]]


def merge_outputs(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Concatenate chunk results in order and reduce their metrics."""
    if len(outputs) == 1:
        return outputs[0]
    kinds = {output.loss_fn_output_type for output in outputs}
    if len(kinds) > 1:
        logger.warning("Chunks of one call returned different output types: %s", sorted(kinds))
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type if outputs else "ArrayRecord",
        loss_fn_outputs=[row for output in outputs for row in output.loss_fn_outputs],
        metrics=reduce_metrics([(o.metrics, len(o.loss_fn_outputs)) for o in outputs]),
    )


def reduce_metrics(chunks: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Reduce the metrics of several chunks, each given with its weight."""
    if not chunks:
        return {}
    merged: dict[str, float] = {}
    for key in chunks[0][0]:
        values = [(metrics[key], weight) for metrics, weight in chunks if key in metrics]
        suffix = key.rpartition(":")[2]
        if suffix == "unique":
            merged.update(_number_unique_values(key, values))
        else:
            # An unknown or missing suffix is reduced as a mean: better than dropping the metric.
            merged[key] = REDUCTIONS.get(suffix, _mean)(values)
    return merged


def _mean(values: WeightedValues) -> float:
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else 0.0


def _slack(values: WeightedValues) -> float:
    has_weight = any(weight for _, weight in values)
    return max(value for value, _ in values) - _mean(values) if has_weight else 0.0


def _hash2(values: WeightedValues) -> float:
    return float(sum(_finite_int(value) & _MASK64 for value, _ in values) & _MASK64)


def _hash_unordered(values: WeightedValues) -> float:
    return float(hash(tuple(sorted(_finite_int(value) for value, _ in values))))


def _finite_int(value: float) -> int:
    return int(value) if math.isfinite(value) else 0


def _number_unique_values(key: str, values: WeightedValues) -> dict[str, float]:
    others = enumerate(values[1:], start=FIRST_EXTRA_UNIQUE)
    return {key: values[0][0]} | {f"{key}_{number}": value for number, (value, _) in others}


REDUCTIONS: dict[str, Callable[[WeightedValues], float]] = {
    "mean": _mean,
    "sum": lambda values: sum(value for value, _ in values),
    "min": lambda values: min(value for value, _ in values),
    "max": lambda values: max(value for value, _ in values),
    "slack": _slack,
    "hash2": _hash2,
    "hash_unordered": _hash_unordered,
}
