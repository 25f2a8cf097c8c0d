"""How the results of several chunks become one: outputs joined, metrics reduced by suffix.

A metric's suffix says how it is reduced (`loss:sum`, `entropy:mean`). Weights are the number of
outputs of each chunk. The first chunk defines which metrics exist; a chunk that lacks one is left
out of its reduction, never counted as zero. Nothing here raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tinkex.logs import get_logger
from tinkex.types import ForwardBackwardOutput

logger = get_logger(__name__)

#: `x:unique` keeps the first value; the next ones become x:unique_2, x:unique_3 ...
FIRST_EXTRA_UNIQUE = 2
_MASK64 = (1 << 64) - 1

WeightedValues = Sequence[tuple[float, int]]


def merge_outputs(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Join chunk results in order."""
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
            # An unknown suffix, or none, is reduced as a mean: a number is better than a gap.
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
    later = enumerate(values[1:], start=FIRST_EXTRA_UNIQUE)
    return {key: values[0][0]} | {f"{key}_{number}": value for number, (value, _) in later}


REDUCTIONS: dict[str, Callable[[WeightedValues], float]] = {
    "mean": _mean,
    "sum": lambda values: sum(value for value, _ in values),
    "min": lambda values: min(value for value, _ in values),
    "max": lambda values: max(value for value, _ in values),
    "slack": _slack,
    "hash2": _hash2,
    "hash_unordered": _hash_unordered,
}
