"""Direct preference optimization (DPO).

The loss of a pair is -log sigmoid(m), m = beta * ((c - c0) - (r - r0)), with c and r the
log-probabilities of the chosen and the rejected answer and c0, r0 those under the initial weights.
The gradient of the server's cross-entropy, -sum w t, w.r.t. a token's log-probability t is -w. So a
step is a forward pass, the loss gradient computed here, beta * sigmoid(-m) for every token of a
pair, and a forward-backward pass with these weights. The gradient is exact and needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from tinkex.client.custom_loss import SurrogateLoss, compute_surrogate
from tinkex.client.future import APIFuture
from tinkex.client.service import ServiceClient
from tinkex.data.jsonl import JsonlFile
from tinkex.data.rendering import RenderedExample
from tinkex.data.rows import PreferenceRow, parse_preference
from tinkex.recipes.method import NoticeFn, RecipeContext, RecipeMethod, SubmittedStep, iter_batches
from tinkex.recipes.plan import DpoPlan
from tinkex.recipes.regularized import (
    find_reference_inputs,
    preference_loss,
    select_metrics,
    with_reference,
)
from tinkex.recipes.run import RecipeData, Run, RunOptions, log_notice
from tinkex.regularizers import with_regularizers
from tinkex.types import AdamParams, Datum, ForwardBackwardOutput


def open_data(plan: DpoPlan) -> RecipeData[PreferenceRow]:
    """Open and check the data of a plan without a server."""
    return RecipeData(plan, parse_preference)


def run(
    plan: DpoPlan,
    service: ServiceClient,
    options: RunOptions | None = None,
    tell: NoticeFn = log_notice,
    data: RecipeData[PreferenceRow] | None = None,
) -> Run[DpoPlan, PreferenceRow]:
    """Create a fine-tuning run; iterate over it for a report per step, then read `result`."""
    return Run(plan, service, DpoMethod, data or open_data(plan), options=options, tell=tell)


class PreferenceLoss(NamedTuple):
    """Loss of a pair and its gradient."""

    loss: float
    margin: float
    """Positive if the chosen answer is preferred more than by the reference."""
    loss_grad: float
    """Magnitude of the loss gradient w.r.t. each token's log-probability."""


def dpo_loss(
    policy: tuple[float, float], reference: tuple[float, float], beta: float
) -> PreferenceLoss:
    """Compute the loss of a pair from the log-probabilities of its chosen and rejected answer."""
    margin = beta * ((policy[0] - reference[0]) - (policy[1] - reference[1]))
    # The exponent is never positive, so exp cannot overflow.
    decay = math.exp(-abs(margin))
    is_wrong = margin < 0.0
    loss = math.log1p(decay) + (-margin if is_wrong else 0.0)
    error_prob = 1.0 / (1.0 + decay) if is_wrong else decay / (1.0 + decay)
    return PreferenceLoss(loss, margin, beta * error_prob)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """The two answers of a row, and futures of their reference log-probabilities."""

    chosen: RenderedExample
    rejected: RenderedExample
    reference_futures: tuple[APIFuture[list[float | None]], APIFuture[list[float | None]]]

    def reference_logprobs(self) -> tuple[float, float]:
        """Return the log-probabilities of both answers under the reference."""
        chosen, rejected = (future.result()[1:] for future in self.reference_futures)
        return (
            self.chosen.sum_target_logprobs([score or 0.0 for score in chosen]),
            self.rejected.sum_target_logprobs([score or 0.0 for score in rejected]),
        )


@dataclass(frozen=True, slots=True)
class ScoredPairBatch:
    """A batch whose forward pass was submitted."""

    pairs: Sequence[PreferencePair]
    forward: APIFuture[ForwardBackwardOutput] | None

    def pair_losses(self, beta: float) -> list[PreferenceLoss]:
        """Compute the loss of each pair with the weights of the forward pass."""
        if self.forward is None:
            return []
        outputs = [output["logprobs"].tolist() for output in self.forward.result().loss_fn_outputs]
        return [
            dpo_loss(
                (
                    pair.chosen.sum_target_logprobs(chosen),
                    pair.rejected.sum_target_logprobs(rejected),
                ),
                pair.reference_logprobs(),
                beta,
            )
            for pair, chosen, rejected in zip(self.pairs, outputs[0::2], outputs[1::2], strict=True)
        ]


class DpoMethod(RecipeMethod[DpoPlan, PreferenceRow]):
    """DPO with the initial weights as reference."""

    def __init__(
        self,
        context: RecipeContext[DpoPlan],
        rows: JsonlFile[PreferenceRow],
        reference_path: str | None = None,
    ) -> None:
        super().__init__(context, rows, reference_path)
        self._sampler = self.open_reference()
        self._prefetched: tuple[int, ScoredPairBatch] | None = None

    def submit(self, step: int, adam: AdamParams) -> SubmittedStep:
        """Submit the weighted batch, and prefetch the forward pass of the next one."""
        plan, training = self.context.plan, self.context.training
        batch, scored = self.batch(step), self._take_scored(step)
        preferences = scored.pair_losses(plan.beta)
        if not preferences:
            return SubmittedStep(batch.epoch)
        metrics = _mean_metrics(preferences)
        if plan.regularizers:
            surrogate = _regularize(scored, plan)
            data = surrogate.data
            metrics |= {"loss": surrogate.loss_sum, **select_metrics(surrogate.metrics)}
        else:
            data = _weighted_data(scored, preferences)
        output_future = training.forward_backward(data, "cross_entropy")
        optim_future = training.optim_step(adam)
        if step + 1 < self.context.num_steps:
            self._prefetched = (step + 1, self._score(self.rows, self.batch(step + 1).rows))
        num_tokens = sum(datum.model_input.length for datum in data)
        loss = metrics.pop("loss")
        return SubmittedStep(batch.epoch, num_tokens, output_future, optim_future, loss, metrics)

    def evaluate(self, rows: JsonlFile[PreferenceRow]) -> dict[str, float]:
        """Compute loss, margin and preference accuracy."""
        plan = self.context.plan
        losses: list[PreferenceLoss] = []
        for numbers in iter_batches(len(rows), plan.batch_size):
            losses += self._score(rows, numbers).pair_losses(plan.beta)
        if not losses:
            return {}
        return {f"eval_{name}": value for name, value in _mean_metrics(losses).items()}

    def drain(self) -> None:
        """Wait for the prefetched batch."""
        if self._prefetched is not None:
            self._prefetched[1].pair_losses(self.context.plan.beta)

    def _take_scored(self, step: int) -> ScoredPairBatch:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == step:
            return prefetched[1]
        return self._score(self.rows, self.batch(step).rows)

    def _score(self, rows: JsonlFile[PreferenceRow], numbers: Sequence[int]) -> ScoredPairBatch:
        pairs = []
        for number, row in zip(numbers, rows.read_rows(numbers), strict=True):
            chosen, rejected = self.context.renderer.render_pair(row)
            if self.context.has_targets(rows.describe_location(number), chosen, rejected):
                score = self._sampler.compute_logprobs
                futures = (score(chosen.model_input), score(rejected.model_input))
                pairs.append(PreferencePair(chosen, rejected, futures))
        data = [example.to_datum() for pair in pairs for example in (pair.chosen, pair.rejected)]
        forward = self.context.training.forward(data, "cross_entropy") if data else None
        return ScoredPairBatch(pairs, forward)


def _weighted_data(scored: ScoredPairBatch, preferences: Sequence[PreferenceLoss]) -> list[Datum]:
    data = []
    for pair, preference in zip(scored.pairs, preferences, strict=True):
        weight = preference.loss_grad / len(preferences)
        data += [pair.chosen.to_datum(weight), pair.rejected.to_datum(-weight)]
    return data


def _regularize(scored: ScoredPairBatch, plan: DpoPlan) -> SurrogateLoss:
    """Compute the regularized loss from the forward pass; no further pass is needed."""
    assert scored.forward is not None  # there are pairs
    names = find_reference_inputs(plan.regularizers)
    data = []
    for pair in scored.pairs:
        for example, future in zip(
            (pair.chosen, pair.rejected), pair.reference_futures, strict=True
        ):
            scores = [score or 0.0 for score in future.result()[1:]]
            data.append(with_reference(example.to_datum(), scores, names))
    base = preference_loss([pair.reference_logprobs() for pair in scored.pairs], plan.beta)
    loss_fn = with_regularizers(base, plan.regularizers)
    return compute_surrogate(data, scored.forward.result().loss_fn_outputs, loss_fn)


def _mean_metrics(preferences: Sequence[PreferenceLoss]) -> dict[str, float]:
    return {
        "loss": fmean(pair.loss for pair in preferences),
        "margin": fmean(pair.margin for pair in preferences),
        "accuracy": fmean(pair.margin > 0.0 for pair in preferences),
    }
