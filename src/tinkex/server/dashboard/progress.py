"""How training goes: updates and their losses, from the single steps that the worker noted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

from tinkex.jobs.kinds import Kind
from tinkex.jobs.outcomes import TOTAL_WEIGHT
from tinkex.server.dashboard.curve import Curve, Point, draw
from tinkex.store.records import Step

LOSS = "loss:sum"
#: Passes that the speed is measured over.
SPEED_PASSES = 20
#: With these a model's history begins, or begins again.
_BEGINNINGS = frozenset({Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step, with the passes whose gradients it applied."""

    no: int
    """The number of its last step in the store."""
    loss: float | None
    """Per token; None if no pass has told its loss."""
    num_tokens: int
    num_passes: int
    seconds: float
    """From the start of its first pass to its end."""
    finished_at: float


@dataclass(frozen=True, kw_only=True)
class History:
    """What is known of one model's steps; it grows by `continued`."""

    updates: tuple[Update, ...] = ()
    """Oldest first."""
    passes: tuple[tuple[int, Step], ...] = ()
    """Whose gradients no optimizer step has applied yet."""
    recent: tuple[Step, ...] = ()
    """The latest passes, for the speed."""
    first_no: int = 0
    last_no: int = 0
    is_whole: bool = True
    """Whether it reaches back to the model's beginning; old steps are forgotten in time."""
    finished_at: float = 0.0
    """When the last step ended; 0 if there is none."""

    @cached_property
    def curve(self) -> Curve | None:
        """The losses of its updates, by their place."""
        places = enumerate(self.updates, 1)
        return draw([Point(at, update.loss) for at, update in places if update.loss is not None])

    @property
    def open_update(self) -> Update | None:
        """The passes that wait for their optimizer step."""
        return update_of(self.passes, None) if self.passes else None

    @property
    def loss(self) -> float | None:
        """The newest loss that was told."""
        told = (update.loss for update in reversed(self.updates) if update.loss is not None)
        return next(told, loss_per_token([step for _, step in self.passes]))

    @property
    def num_tokens(self) -> int:
        """Tokens of all passes."""
        closed = sum(update.num_tokens for update in self.updates)
        return closed + sum(step.num_tokens for _, step in self.passes)


def continued(history: History, steps: Sequence[tuple[int, Step]]) -> History:
    """The history with the steps that followed it, oldest first."""
    if not steps:
        return history
    updates, passes = list(history.updates), list(history.passes)
    for no, step in steps:
        if step.kind == Kind.FORWARD_BACKWARD:
            passes.append((no, step))
        elif step.kind == Kind.OPTIM_STEP:
            updates.append(update_of(passes, (no, step)))
            passes = []
        elif step.kind in _BEGINNINGS:
            # Loading drops the gradients that were gathered.
            passes = []
    is_first = history.last_no == 0
    new = [step for _, step in steps if step.kind == Kind.FORWARD_BACKWARD]
    return replace(
        history,
        updates=tuple(updates),
        passes=tuple(passes),
        recent=(*history.recent, *new)[-SPEED_PASSES:],
        first_no=steps[0][0] if is_first else history.first_no,
        last_no=steps[-1][0],
        is_whole=steps[0][1].kind in _BEGINNINGS if is_first else history.is_whole,
        finished_at=steps[-1][1].finished_at,
    )


def without_before(history: History, oldest_no: int) -> History:
    """The history without what the store has forgotten, so that all processes tell the same."""
    if oldest_no <= history.first_no:
        return history
    kept = tuple(update for update in history.updates if update.no >= oldest_no)
    passes = tuple(one for one in history.passes if one[0] >= oldest_no)
    return replace(history, updates=kept, passes=passes, first_no=oldest_no, is_whole=False)


def update_of(passes: Sequence[tuple[int, Step]], end: tuple[int, Step] | None) -> Update:
    """The update that some passes make, with its optimizer step or before it."""
    steps = [step for _, step in passes]
    last_no, last = end if end is not None else passes[-1]
    first = steps[0] if steps else last
    return Update(
        no=last_no,
        loss=loss_per_token(steps),
        num_tokens=sum(step.num_tokens for step in steps),
        num_passes=len(steps),
        seconds=last.finished_at - first.started_at,
        finished_at=last.finished_at,
    )


def loss_per_token(passes: Sequence[Step]) -> float | None:
    """The mean loss of the tokens of some passes, as they are weighed if they are."""
    told = [(step.num_tokens, step.metrics) for step in passes if step.metrics is not None]
    counted = [(num, metrics) for num, metrics in told if LOSS in metrics]
    weight = sum(metrics.get(TOTAL_WEIGHT, num) for num, metrics in counted)
    if weight <= 0:
        return None
    loss = sum(metrics[LOSS] for _, metrics in counted) / weight
    # The page reads JSON, which has no other numbers: it draws a gap.
    return loss if isfinite(loss) else None


def tokens_per_second(passes: Sequence[Step]) -> float | None:
    """How fast some passes were, with the pauses between them."""
    if not passes:
        return None
    seconds = max(step.finished_at for step in passes) - min(step.started_at for step in passes)
    return sum(step.num_tokens for step in passes) / seconds if seconds > 0 else None
