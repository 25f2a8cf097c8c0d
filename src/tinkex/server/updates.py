"""Updates of a model: an optimizer step with its passes, its loss and its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from tinkex.jobs.outcomes import TOTAL_WEIGHT_METRIC
from tinkex.server.headlines import is_headline
from tinkex.store.records import StepRecord

LOSS_METRIC = "loss:sum"
#: Passes that the speed is measured over.
NUM_SPEED_PASSES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUpdate:
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
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What its client reported about it."""

    def value_of(self, metric: str) -> float | None:
        """A metric by name; None if it is not known."""
        return self.loss if metric == "loss" else self.metrics.get(metric)


def build_update(
    passes: Sequence[tuple[int, StepRecord]], optim_step: tuple[int, StepRecord] | None
) -> OptimizerUpdate:
    """The update that some passes make, with its optimizer step or before it."""
    steps = [step for _, step in passes]
    last_no, last = optim_step if optim_step is not None else passes[-1]
    first = steps[0] if steps else last
    reported = _reported_metrics(last if optim_step is not None else None)
    return OptimizerUpdate(
        no=last_no,
        loss=reported.get("loss", loss_per_token(steps)),
        num_tokens=sum(step.num_tokens for step in steps),
        num_passes=len(steps),
        seconds=last.finished_at - first.started_at,
        finished_at=last.finished_at,
        metrics=reported,
    )


def _reported_metrics(step: StepRecord | None) -> dict[str, float]:
    """The metrics of an optimizer step that say how training goes."""
    told = (step.metrics or {}) if step is not None else {}
    return {name: told[name] for name in told if is_headline(name) and isfinite(told[name])}


def loss_per_token(passes: Sequence[StepRecord]) -> float | None:
    """The mean loss of the tokens of some passes, as they are weighed if they are."""
    told = [(step.num_tokens, step.metrics) for step in passes if step.metrics is not None]
    counted = [(num, metrics) for num, metrics in told if LOSS_METRIC in metrics]
    weight = sum(metrics.get(TOTAL_WEIGHT_METRIC, num) for num, metrics in counted)
    if weight <= 0:
        return None
    loss = sum(metrics[LOSS_METRIC] for _, metrics in counted) / weight
    # The page reads JSON, which has no other numbers: it draws a gap.
    return loss if isfinite(loss) else None


def tokens_per_second(passes: Sequence[StepRecord]) -> float | None:
    """How fast some passes were, with the pauses between them."""
    if not passes:
        return None
    seconds = max(step.finished_at for step in passes) - min(step.started_at for step in passes)
    return sum(step.num_tokens for step in passes) / seconds if seconds > 0 else None
