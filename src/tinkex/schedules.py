"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

ScheduleKind: TypeAlias = Literal["constant", "linear", "cosine"]
SCHEDULE_KINDS: tuple[str, ...] = get_args(ScheduleKind)


def learning_rate(
    step: int, *, peak: float, warmup: int, total: int, kind: ScheduleKind, floor: float = 0.0
) -> float:
    """Return the learning rate of a step counted from 0.

    The rate rises linearly to `peak` over `warmup` steps; "linear" and "cosine" then decay to
    `floor` at step `total` and stay there.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if kind == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    decay = 1.0 - done if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (peak - floor) * decay


def warmup_steps(warmup: float, total: int) -> int:
    """Return the number of warmup steps; a warmup below 1 is a fraction of all steps."""
    steps = round(warmup * total) if warmup < 1.0 else round(warmup)
    return min(steps, total)
