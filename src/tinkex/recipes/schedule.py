"""What a step does, as pure functions of its number: which rows, and how large a step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


class RowBatch(NamedTuple):
    """The rows of one step."""

    epoch: int
    """Counted from 0."""
    rows: Sequence[int]


def count_steps(num_rows: int, batch_size: int, epochs: int, steps: int | None) -> int:
    """How many steps a run has; `steps` wins over `epochs`."""
    return steps if steps is not None else epochs * steps_per_epoch(num_rows, batch_size)


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """How many batches it takes to see every row once; the last may be smaller."""
    return math.ceil(num_rows / batch_size)


def batch_at(step: int, num_rows: int, batch_size: int, seed: int) -> RowBatch:
    """The rows of a step counted from 0; each epoch has its own order, known by seed and number."""
    epoch, place = divmod(step, steps_per_epoch(num_rows, batch_size))
    order = _epoch_order(num_rows, seed, epoch)
    return RowBatch(epoch, order[place * batch_size : (place + 1) * batch_size])


@lru_cache(maxsize=2)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def warmup_steps(warmup: float, num_steps: int) -> int:
    """A warm-up below 1 is a share of all steps, otherwise a number of them."""
    wanted = round(warmup * num_steps) if warmup < 1.0 else round(warmup)
    return min(wanted, num_steps)


def learning_rate(
    step: int, num_steps: int, *, peak: float, num_warmup: int, schedule: Schedule
) -> float:
    """The rate of a step counted from 0: up in a line to the peak, then as the schedule says."""
    if step < num_warmup:
        return peak * (step + 1) / num_warmup
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    if schedule == "linear":
        return peak * max(0.0, 1.0 - done)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return peak


def derive_seed(seed: int, *parts: object) -> int:
    """A seed for one draw of a run: the same for the same parts, unlike any other."""
    return random.Random("/".join(map(str, (seed, *parts)))).getrandbits(31)
