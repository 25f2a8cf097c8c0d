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
from tinkex.recipes.method import Method, Setting, Submitted, Tell, batches_of
from tinkex.recipes.plan import DpoPlan
from tinkex.recipes.rendering import Example
from tinkex.recipes.rows import PreferenceRow, parse_preference
from tinkex.recipes.run import Data, Run, RunOptions, log_notice
from tinkex.types import AdamParams, ForwardBackwardOutput


def open_data(plan: DpoPlan) -> Data[PreferenceRow]:
    """The rows of a plan, all checked; it needs no server."""
    return Data(plan, parse_preference)


def run(
    plan: DpoPlan,
    service: ServiceClient,
    options: RunOptions | None = None,
    tell: Tell = log_notice,
    data: Data[PreferenceRow] | None = None,
) -> Run[DpoPlan, PreferenceRow]:
    """A fine-tune; iterate over it for a report per step, then look at its `result`."""
    return Run(plan, service, Dpo, data or open_data(plan), options=options, tell=tell)


class Preference(NamedTuple):
    """What a pair says."""

    loss: float
    margin: float
    """Positive where the chosen answer is preferred more than at the start."""
    pull: float
    """The size of the loss's slope by every token of the pair."""


def prefer(policy: tuple[float, float], reference: tuple[float, float], beta: float) -> Preference:
    """The loss of a pair, given the log-probabilities of its chosen and rejected answer."""
    margin = beta * ((policy[0] - reference[0]) - (policy[1] - reference[1]))
    # exp of a negative number only, so that nothing overflows.
    shrunk = math.exp(-abs(margin))
    is_wrong = margin < 0.0
    loss = math.log1p(shrunk) + (-margin if is_wrong else 0.0)
    doubt = 1.0 / (1.0 + shrunk) if is_wrong else shrunk / (1.0 + shrunk)
    return Preference(loss, margin, beta * doubt)


@dataclass(frozen=True, slots=True)
class Pair:
    """The two answers of one row, and their scores under the starting weights, when they come."""

    chosen: Example
    rejected: Example
    scoring: tuple[APIFuture[list[float | None]], APIFuture[list[float | None]]]

    def reference(self) -> tuple[float, float]:
        """The log-probabilities of both answers under the starting weights."""
        chosen, rejected = (future.result()[1:] for future in self.scoring)
        return (
            self.chosen.sum_learned([score or 0.0 for score in chosen]),
            self.rejected.sum_learned([score or 0.0 for score in rejected]),
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """A batch whose forward pass is on its way."""

    pairs: Sequence[Pair]
    forward: APIFuture[ForwardBackwardOutput] | None

    def preferences(self, beta: float) -> list[Preference]:
        """What each pair says, with the weights of the forward pass."""
        if self.forward is None:
            return []
        outputs = [each["logprobs"].tolist() for each in self.forward.result().loss_fn_outputs]
        return [
            prefer(
                (pair.chosen.sum_learned(chosen), pair.rejected.sum_learned(rejected)),
                pair.reference(),
                beta,
            )
            for pair, chosen, rejected in zip(self.pairs, outputs[0::2], outputs[1::2], strict=True)
        ]


class Dpo(Method[DpoPlan, PreferenceRow]):
    """Pairs, compared with the weights that the run began with."""

    def __init__(
        self,
        setting: Setting[DpoPlan],
        rows: JsonlFile[PreferenceRow],
        reference_path: str | None = None,
    ) -> None:
        super().__init__(setting, rows)
        self.reference_path = reference_path or self._save_reference()
        # A new adapter changes nothing, so that the base model itself is where it starts.
        self._reference = setting.service.create_sampling_client(
            model_path=self.reference_path,
            base_model=None if self.reference_path else setting.plan.base_model,
        )
        self._ahead: tuple[int, Scored] | None = None

    def submit(self, step: int, adam: AdamParams) -> Submitted:
        """Weigh the batch, send it, and score the next one behind it."""
        plan, training = self.setting.plan, self.setting.training
        batch, scored = self.batch(step), self._scored(step)
        preferences = scored.preferences(plan.beta)
        if not preferences:
            return Submitted(batch.epoch)
        data = []
        for pair, found in zip(scored.pairs, preferences, strict=True):
            weight = found.pull / len(preferences)
            data += [pair.chosen.datum(weight), pair.rejected.datum(-weight)]
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(adam)
        if step + 1 < self.setting.num_steps:
            self._ahead = (step + 1, self._score(self.rows, self.batch(step + 1).rows))
        metrics = _sum_up(preferences)
        num_tokens = sum(datum.model_input.length for datum in data)
        return Submitted(batch.epoch, num_tokens, passed, stepped, metrics.pop("loss"), metrics)

    def evaluate(self, rows: JsonlFile[PreferenceRow]) -> dict[str, float]:
        """Loss, margin and the share of pairs whose chosen answer is preferred."""
        plan = self.setting.plan
        found: list[Preference] = []
        for numbers in batches_of(len(rows), plan.batch_size):
            found += self._score(rows, numbers).preferences(plan.beta)
        return {f"eval_{name}": value for name, value in _sum_up(found).items()} if found else {}

    def settle(self) -> None:
        """Wait for the batch that was scored ahead."""
        if self._ahead is not None:
            self._ahead[1].preferences(self.setting.plan.beta)

    def _scored(self, step: int) -> Scored:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            return ahead[1]
        return self._score(self.rows, self.batch(step).rows)

    def _score(self, rows: JsonlFile[PreferenceRow], numbers: Sequence[int]) -> Scored:
        pairs = []
        for number, row in zip(numbers, rows.read_rows(numbers), strict=True):
            chosen, rejected = self.setting.renderer.pair(row)
            if self.setting.has_lesson(rows.describe_location(number), chosen, rejected):
                score = self._reference.compute_logprobs
                scoring = (score(chosen.model_input), score(rejected.model_input))
                pairs.append(Pair(chosen, rejected, scoring))
        data = [each.datum() for pair in pairs for each in (pair.chosen, pair.rejected)]
        forward = self.setting.training.forward(data, "cross_entropy") if data else None
        return Scored(pairs, forward)

    def _save_reference(self) -> str | None:
        plan = self.setting.plan
        if plan.start_from is None:
            return None
        saved = self.setting.training.save_weights_for_sampler(f"{plan.label}-reference")
        return saved.result().path


def _sum_up(preferences: Sequence[Preference]) -> dict[str, float]:
    return {
        "loss": fmean(each.loss for each in preferences),
        "margin": fmean(each.margin for each in preferences),
        "accuracy": fmean(each.margin > 0.0 for each in preferences),
    }
