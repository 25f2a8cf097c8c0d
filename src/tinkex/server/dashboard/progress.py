"""How training goes: updates and their losses, from the single steps that the worker noted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tinkex.jobs.kinds import JobKind
from tinkex.server.dashboard.curve import CurveLayout, Point, layout_curve
from tinkex.server.headlines import primary_metric
from tinkex.server.updates import NUM_SPEED_PASSES, OptimizerUpdate, build_update
from tinkex.store.records import StepRecord

#: With these a model's history begins, or begins again.
_START_KINDS = frozenset({JobKind.CREATE_MODEL, JobKind.LOAD_WEIGHTS})


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What is known of one model's steps; it grows by `continued`."""

    updates: tuple[OptimizerUpdate, ...] = ()
    """Oldest first."""
    passes: tuple[tuple[int, StepRecord], ...] = ()
    """Whose gradients no optimizer step has applied yet."""
    recent: tuple[StepRecord, ...] = ()
    """The latest passes, for the speed."""
    first_no: int = 0
    last_no: int = 0
    is_whole: bool = True
    """Whether it reaches back to the model's beginning; old steps are forgotten in time."""
    finished_at: float = 0.0
    """When the last step ended; 0 if there is none."""
    num_dropped: int = 0
    """How many updates the store no longer has; they came before the others."""

    @property
    def metric(self) -> str:
        """The metric that its curve shows."""
        return primary_metric(self.updates[-1].metrics if self.updates else {})

    @cached_property
    def curve(self) -> CurveLayout | None:
        """One metric of its updates, by their place."""
        values = ((at, update.value_of(self.metric)) for at, update in self.numbered_updates())
        return layout_curve([Point(at, value) for at, value in values if value is not None])

    def numbered_updates(self) -> enumerate[OptimizerUpdate]:
        """The updates with their places, counted from the run's first."""
        return enumerate(self.updates, self.num_dropped + 1)

    @property
    def open_update(self) -> OptimizerUpdate | None:
        """The passes that wait for their optimizer step."""
        return build_update(self.passes, None) if self.passes else None

    @property
    def num_tokens(self) -> int:
        """Tokens of all passes."""
        closed = sum(update.num_tokens for update in self.updates)
        return closed + sum(step.num_tokens for _, step in self.passes)


def extend_history(history: RunHistory, steps: Sequence[tuple[int, StepRecord]]) -> RunHistory:
    """The history with the steps that followed it, oldest first."""
    if not steps:
        return history
    updates, passes = list(history.updates), list(history.passes)
    for no, step in steps:
        if step.kind == JobKind.FORWARD_BACKWARD:
            passes.append((no, step))
        elif step.kind == JobKind.OPTIM_STEP:
            updates.append(build_update(passes, (no, step)))
            passes = []
        elif step.kind in _START_KINDS:
            # Loading drops the gradients that were gathered.
            passes = []
    is_first = history.last_no == 0
    new = [step for _, step in steps if step.kind == JobKind.FORWARD_BACKWARD]
    return replace(
        history,
        updates=tuple(updates),
        passes=tuple(passes),
        recent=(*history.recent, *new)[-NUM_SPEED_PASSES:],
        first_no=steps[0][0] if is_first else history.first_no,
        last_no=steps[-1][0],
        is_whole=steps[0][1].kind in _START_KINDS if is_first else history.is_whole,
        finished_at=steps[-1][1].finished_at,
    )


def drop_before(history: RunHistory, oldest_no: int) -> RunHistory:
    """The history without what the store has forgotten, so that all processes tell the same."""
    if oldest_no <= history.first_no:
        return history
    kept = tuple(update for update in history.updates if update.no >= oldest_no)
    passes = tuple(one for one in history.passes if one[0] >= oldest_no)
    return replace(history, updates=kept, passes=passes, first_no=oldest_no, is_whole=False)
