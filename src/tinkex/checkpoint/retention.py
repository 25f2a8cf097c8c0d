"""Choose which step checkpoints are kept: a pure function of step numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tinkex.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRetention:
    """Which step checkpoints of a run are kept."""

    keep_last: int = 3
    """Number of newest steps to keep; 0 or less keeps all."""
    keep_every: int = 0
    """Keep every step that is a multiple of this; 0 disables it."""

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
    """Return the steps to keep: the newest, every K-th, the best by metric, and pinned ones."""
    existing = sorted(set(steps))
    if retention.keep_last <= 0:
        return set(existing)
    kept = set(existing[-retention.keep_last :])
    if retention.keep_every:
        kept.update(step for step in existing if step % retention.keep_every == 0)
    kept.update(step for step in existing if step == best)
    return kept | set(existing).intersection(pinned)
