"""Direct preference optimization: prefer the chosen answer more than the starting weights did.

The loss of a pair is -log sigmoid(m), m = beta * ((c - c0) - (r - r0)), with c and r the
log-probabilities of the chosen and the rejected answer and c0, r0 those under the starting weights.
The server knows cross entropy, -sum w t, whose slope by a token's log-probability t is -w. So a
step is a forward pass, the slope of the loss worked out here, which is beta * sigmoid(-m) for every
token of a pair, and a second pass with these weights. The gradient is exact, and needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from tinkex.client.future import APIFuture
from tinkex.client.service import ServiceClient
from tinkex.data.jsonl import JsonlFile
from tinkex.data.rendering import RenderedExample
from tinkex.data.rows import PreferenceRow, parse_preference
from tinkex.recipes.method import NoticeFn, RecipeContext, RecipeMethod, SubmittedStep, iter_batches
from tinkex.recipes.plan import DpoPlan
from tinkex.recipes.run import RecipeData, Run, RunOptions, log_notice
from tinkex.types import AdamParams, ForwardBackwardOutput


def open_data(plan: DpoPlan) -> RecipeData[PreferenceRow]:
    """The rows of a plan, all checked; it needs no server."""
    return RecipeData(plan, parse_preference)


def run(
    plan: DpoPlan,
    service: ServiceClient,
    options: RunOptions | None = None,
    tell: NoticeFn = log_notice,
    data: RecipeData[PreferenceRow] | None = None,
) -> Run[DpoPlan, PreferenceRow]:
    """A fine-tune; iterate over it for a report per step, then look at its `result`."""
    return Run(plan, service, DpoMethod, data or open_data(plan), options=options, tell=tell)


class PreferenceLoss(NamedTuple):
    """What a pair says."""

    loss: float
    margin: float
    """Positive where the chosen answer is preferred more than at the start."""
    loss_grad: float
    """The size of the loss's slope by every token of the pair."""


def dpo_loss(
    policy: tuple[float, float], reference: tuple[float, float], beta: float
) -> PreferenceLoss:
    """The loss of a pair, given the log-probabilities of its chosen and rejected answer."""
    margin = beta * ((policy[0] - reference[0]) - (policy[1] - reference[1]))
    # exp of a negative number only, so that nothing overflows.
    shrunk = math.exp(-abs(margin))
    is_wrong = margin < 0.0
    loss = math.log1p(shrunk) + (-margin if is_wrong else 0.0)
    doubt = 1.0 / (1.0 + shrunk) if is_wrong else shrunk / (1.0 + shrunk)
    return PreferenceLoss(loss, margin, beta * doubt)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """The two answers of one row, and their scores under the starting weights, when they come."""

    chosen: RenderedExample
    rejected: RenderedExample
    reference_futures: tuple[APIFuture[list[float | None]], APIFuture[list[float | None]]]

    def reference_logprobs(self) -> tuple[float, float]:
        """The log-probabilities of both answers under the starting weights."""
        chosen, rejected = (future.result()[1:] for future in self.reference_futures)
        return (
            self.chosen.sum_target_logprobs([score or 0.0 for score in chosen]),
            self.rejected.sum_target_logprobs([score or 0.0 for score in rejected]),
        )


@dataclass(frozen=True, slots=True)
class ScoredPairBatch:
    """A batch whose forward pass is on its way."""

    pairs: Sequence[PreferencePair]
    forward: APIFuture[ForwardBackwardOutput] | None

    def pair_losses(self, beta: float) -> list[PreferenceLoss]:
        """What each pair says, with the weights of the forward pass."""
        if self.forward is None:
            return []
        outputs = [each["logprobs"].tolist() for each in self.forward.result().loss_fn_outputs]
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
    """Pairs, compared with the weights that the run began with."""

    def __init__(
        self,
        context: RecipeContext[DpoPlan],
        rows: JsonlFile[PreferenceRow],
        reference_path: str | None = None,
    ) -> None:
        super().__init__(context, rows)
        self.reference_path = reference_path or self._save_reference()
        # A new adapter changes nothing, so that the base model itself is where it starts.
        self._reference = context.service.create_sampling_client(
            model_path=self.reference_path,
            base_model=None if self.reference_path else context.plan.base_model,
        )
        self._prefetched: tuple[int, ScoredPairBatch] | None = None

    def submit(self, step: int, adam: AdamParams) -> SubmittedStep:
        """Weigh the batch, send it, and score the next one behind it."""
        plan, training = self.context.plan, self.context.training
        batch, scored = self.batch(step), self._take_scored(step)
        preferences = scored.pair_losses(plan.beta)
        if not preferences:
            return SubmittedStep(batch.epoch)
        data = []
        for pair, found in zip(scored.pairs, preferences, strict=True):
            weight = found.loss_grad / len(preferences)
            data += [pair.chosen.to_datum(weight), pair.rejected.to_datum(-weight)]
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(adam)
        if step + 1 < self.context.num_steps:
            self._prefetched = (step + 1, self._score(self.rows, self.batch(step + 1).rows))
        metrics = _mean_metrics(preferences)
        num_tokens = sum(datum.model_input.length for datum in data)
        return SubmittedStep(batch.epoch, num_tokens, passed, stepped, metrics.pop("loss"), metrics)

    def evaluate(self, rows: JsonlFile[PreferenceRow]) -> dict[str, float]:
        """Loss, margin and the share of pairs whose chosen answer is preferred."""
        plan = self.context.plan
        found: list[PreferenceLoss] = []
        for numbers in iter_batches(len(rows), plan.batch_size):
            found += self._score(rows, numbers).pair_losses(plan.beta)
        return (
            {f"eval_{name}": value for name, value in _mean_metrics(found).items()} if found else {}
        )

    def drain(self) -> None:
        """Wait for the batch that was scored ahead."""
        if self._prefetched is not None:
            self._prefetched[1].pair_losses(self.context.plan.beta)

    def _take_scored(self, step: int) -> ScoredPairBatch:
        ahead, self._prefetched = self._prefetched, None
        if ahead is not None and ahead[0] == step:
            return ahead[1]
        return self._score(self.rows, self.batch(step).rows)

    def _score(self, rows: JsonlFile[PreferenceRow], numbers: Sequence[int]) -> ScoredPairBatch:
        pairs = []
        for number, row in zip(numbers, rows.read_rows(numbers), strict=True):
            chosen, rejected = self.context.renderer.render_pair(row)
            if self.context.has_targets(rows.describe_location(number), chosen, rejected):
                score = self._reference.compute_logprobs
                scoring = (score(chosen.model_input), score(rejected.model_input))
                pairs.append(PreferencePair(chosen, rejected, scoring))
        data = [each.to_datum() for pair in pairs for each in (pair.chosen, pair.rejected)]
        forward = self.context.training.forward(data, "cross_entropy") if data else None
        return ScoredPairBatch(pairs, forward)

    def _save_reference(self) -> str | None:
        plan = self.context.plan
        if plan.start_from is None:
            return None
        saved = self.context.training.save_weights_for_sampler(f"{plan.label}-reference")
        return saved.result().path


def _mean_metrics(preferences: Sequence[PreferenceLoss]) -> dict[str, float]:
    return {
        "loss": fmean(each.loss for each in preferences),
        "margin": fmean(each.margin for each in preferences),
        "accuracy": fmean(each.margin > 0.0 for each in preferences),
    }
