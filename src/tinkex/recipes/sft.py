"""Supervised fine-tuning: raise the probability of what the data says.

    for step in sft.run(SftPlan(data=Path("chat.jsonl"), base_model="Qwen/Qwen3-8B"), service):
        print(step.step, step.loss)

The loss is the mean over the learned tokens of a batch: weights are 1 / their number, because the
server sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.client.service import ServiceClient
from tinkex.data.jsonl import JsonlFile
from tinkex.recipes.method import Method, Submitted, Tell, batches_of
from tinkex.recipes.plan import SftPlan
from tinkex.recipes.rendering import Example
from tinkex.recipes.rows import ChatRow, TextRow, parse_sft
from tinkex.recipes.run import Data, Run, RunOptions, log_notice
from tinkex.types import AdamParams

SftRow = ChatRow | TextRow


def open_data(plan: SftPlan) -> Data[SftRow]:
    """The rows of a plan, all checked; it needs no server."""
    return Data(plan, parse_sft)


def run(
    plan: SftPlan,
    service: ServiceClient,
    options: RunOptions | None = None,
    tell: Tell = log_notice,
    data: Data[SftRow] | None = None,
) -> Run[SftPlan, SftRow]:
    """A fine-tune; iterate over it for a report per step, then look at its `result`."""
    return Run(plan, service, Sft, data or open_data(plan), options=options, tell=tell)


class Sft(Method[SftPlan, SftRow]):
    """Cross entropy on completions and on what the assistant says."""

    is_measured_here = False

    def submit(self, step: int, adam: AdamParams) -> Submitted:
        """Both calls are sent before either is waited for, so the server never idles."""
        batch = self.batch(step)
        examples = self._examples(self.rows, batch.rows)
        if not examples:
            return Submitted(batch.epoch)
        num_learned = sum(example.num_learned for example in examples)
        data = [example.datum(1.0 / num_learned) for example in examples]
        return Submitted(
            batch.epoch,
            sum(datum.model_input.length for datum in data),
            self.setting.training.forward_backward(data, "cross_entropy"),
            self.setting.training.optim_step(adam),
            metrics={"learned_tokens": num_learned},
        )

    def evaluate(self, rows: JsonlFile[SftRow]) -> dict[str, float]:
        """The mean loss of a learned token."""
        loss_sum, num_learned = 0.0, 0
        for numbers in batches_of(len(rows), self.setting.plan.batch_size):
            examples = self._examples(rows, numbers)
            if not examples:
                continue
            data = [example.datum() for example in examples]
            output = self.setting.training.forward(data, "cross_entropy").result()
            for example, scored in zip(examples, output.loss_fn_outputs, strict=True):
                loss_sum -= example.sum_learned(scored["logprobs"].tolist())
                num_learned += example.num_learned
        return {"eval_loss": loss_sum / num_learned} if num_learned else {}

    def _examples(self, rows: JsonlFile[SftRow], numbers: Sequence[int]) -> list[Example]:
        return [
            example
            for number, row in zip(numbers, rows.read_rows(numbers), strict=True)
            for example in self.setting.renderer.examples(row)
            if self.setting.has_lesson(rows.describe_location(number), example)
        ]
