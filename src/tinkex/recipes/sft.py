"""Supervised fine-tuning (SFT).

    for step in sft.run(SftPlan(data=Path("chat.jsonl"), base_model="Qwen/Qwen3-8B"), service):
        print(step.step, step.loss)

The loss is the mean over the targets of a batch; the server sums, so each target has the weight
1 / number of targets.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.client.service import ServiceClient
from tinkex.data.jsonl import JsonlFile
from tinkex.data.rendering import RenderedExample
from tinkex.data.rows import ChatRow, PromptCompletionRow, parse_sft
from tinkex.recipes.method import NoticeFn, RecipeMethod, SubmittedStep, iter_batches
from tinkex.recipes.plan import SftPlan
from tinkex.recipes.regularized import cross_entropy, regularizer_metrics
from tinkex.recipes.run import RecipeData, Run, RunOptions, log_notice
from tinkex.types import AdamParams

SftRow = ChatRow | PromptCompletionRow


def open_data(plan: SftPlan) -> RecipeData[SftRow]:
    """Open and check the data of a plan without a server."""
    return RecipeData(plan, parse_sft)


def run(
    plan: SftPlan,
    service: ServiceClient,
    options: RunOptions | None = None,
    tell: NoticeFn = log_notice,
    data: RecipeData[SftRow] | None = None,
) -> Run[SftPlan, SftRow]:
    """Create a fine-tuning run; iterate over it for a report per step, then read `result`."""
    return Run(plan, service, SftMethod, data or open_data(plan), options=options, tell=tell)


class SftMethod(RecipeMethod[SftPlan, SftRow]):
    """Cross-entropy on completions and assistant messages."""

    computes_metrics_locally = False

    def submit(self, step: int, adam: AdamParams) -> SubmittedStep:
        """Send both requests without waiting, so that the server does not idle."""
        batch = self.batch(step)
        examples = self._examples(self.rows, batch.rows)
        if not examples:
            return SubmittedStep(batch.epoch)
        num_learned = sum(example.num_learned for example in examples)
        data = [example.to_datum(1.0 / num_learned) for example in examples]
        is_regularized = bool(self.context.plan.regularizers)
        return SubmittedStep(
            batch.epoch,
            sum(datum.model_input.length for datum in data),
            self.submit_regularized(data, cross_entropy)
            if is_regularized
            else self.context.training.forward_backward(data, "cross_entropy"),
            self.context.training.optim_step(adam),
            metrics={"learned_tokens": num_learned},
            compute_metrics=regularizer_metrics if is_regularized else None,
        )

    def evaluate(self, rows: JsonlFile[SftRow]) -> dict[str, float]:
        """Compute the mean loss per target."""
        loss_sum, num_learned = 0.0, 0
        for numbers in iter_batches(len(rows), self.context.plan.batch_size):
            examples = self._examples(rows, numbers)
            if not examples:
                continue
            data = [example.to_datum() for example in examples]
            output = self.context.training.forward(data, "cross_entropy").result()
            for example, scored in zip(examples, output.loss_fn_outputs, strict=True):
                loss_sum -= example.sum_target_logprobs(scored["logprobs"].tolist())
                num_learned += example.num_learned
        return {"eval_loss": loss_sum / num_learned} if num_learned else {}

    def _examples(self, rows: JsonlFile[SftRow], numbers: Sequence[int]) -> list[RenderedExample]:
        return [
            example
            for number, row in zip(numbers, rows.read_rows(numbers), strict=True)
            for example in self.context.renderer.render_examples(row)
            if self.context.has_targets(rows.describe_location(number), example)
        ]
