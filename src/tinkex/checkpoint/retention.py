"""Which step checkpoints stay on disk: a decision about numbers, without files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tinkex.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRetention:
    """What a run wants to keep of its steps."""

    keep_last: int = 3
    """How many of the newest steps stay; 0 or less keeps all."""
    keep_every: int = 0
    """Steps that are multiples of it stay for good; 0 means none."""

    def __post_init__(self) -> None:
        if self.keep_every < 0:
            raise ConfigError(f"keep_every must not be negative, got {self.keep_every}")


def choose_steps_to_keep(
    steps: Iterable[int],
    retention: StepRetention,
    *,
    best: int | None = None,
    pinned: Iterable[int] = (),
) -> set[int]:
    """The steps that stay: the newest, every K-th, the best by its metric and the pinned."""
    known = sorted(set(steps))
    if retention.keep_last <= 0:
        return set(known)
    kept = set(known[-retention.keep_last :])
    if retention.keep_every:
        kept.update(step for step in known if step % retention.keep_every == 0)
    kept.update(step for step in known if step == best)
    return kept | set(known).intersection(pinned)
