"""Reinforcement learning with a user-defined reward function and group advantages."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from types import ModuleType

from tinkex.client.future import APIFuture
from tinkex.client.sampling import SamplingClient
from tinkex.client.service import ServiceClient
from tinkex.data.jsonl import JsonlFile
from tinkex.data.rows import PromptRow, parse_prompt
from tinkex.display import format_count
from tinkex.errors import APIResponseValidationError, InvalidInput
from tinkex.recipes.method import (
    NoticeFn,
    RecipeContext,
    RecipeMethod,
    SubmittedStep,
    derive_seed,
    iter_batches,
)
from tinkex.recipes.plan import RlPlan
from tinkex.recipes.regularized import policy_loss, select_metrics
from tinkex.recipes.run import RecipeData, Run, RunOptions, log_notice
from tinkex.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function; higher is better."""

    name: str
    """FILE.py:FUNCTION, as given."""
    digest: str
    """SHA-256 of the file."""
    function: Callable[[dict[str, object], str], float] = field(repr=False)

    def __call__(self, row: Mapping[str, object], text: str) -> float:
        """Compute the reward of an answer to the prompt of a row."""
        try:
            # A copy, so that the function cannot change the row for the next answer.
            result = self.function(dict(row), text)
        except Exception as error:  # user code may raise anything
            raise InvalidInput(
                f"the reward {self.name} failed on {text[:80]!r}: {type(error).__name__}: {error}"
            ) from error
        try:
            value = float(result)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise InvalidInput(
                f"the reward {self.name} returned {result!r:.80} for {text[:80]!r}; "
                "expected a finite number"
            )
        return value


def load_reward(text: str) -> RewardFunction:
    """Load the function FILE.py:FUNCTION; the file is executed once."""
    file, colon, function_name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not function_name.isidentifier():
        raise InvalidInput(
            f"the reward is {text!r}; expected FILE.py:FUNCTION",
            hint="The function takes (row, text) and returns a number; higher is better.",
        )
    path = Path(file)
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInput(f"the reward file {path} cannot be read: {reason}") from error
    function = getattr(_load_module(path), function_name, None)
    if not callable(function):
        raise InvalidInput(f"{path} has no function {function_name!r}")
    return RewardFunction(text, hashlib.sha256(content).hexdigest(), function)


def _load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tinkex_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module, and the file may import its neighbours.
    sys.modules[spec.name] = module
    sys.path.append(str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code may raise anything
        del sys.modules[spec.name]
        raise InvalidInput(f"{path} failed: {type(error).__name__}: {error}") from error
    return module


class RlData(RecipeData[PromptRow]):
    """The data of a plan and its reward function."""

    def __init__(self, plan: RlPlan) -> None:
        self.reward = load_reward(plan.reward)
        super().__init__(plan, parse_prompt)


def open_data(plan: RlPlan) -> RlData:
    """Open and check the data and the reward function of a plan without a server."""
    return RlData(plan)


def run(
    plan: RlPlan,
    service: ServiceClient,
    options: RunOptions | None = None,
    tell: NoticeFn = log_notice,
    data: RlData | None = None,
) -> Run[RlPlan, PromptRow]:
    """Create a fine-tuning run; iterate over it for a report per step, then read `result`."""
    data = data or open_data(plan)
    function = data.reward.name.rpartition(":")[2]
    return Run(
        plan,
        service,
        partial(RlMethod, reward=data.reward),
        data,
        options=options,
        tell=tell,
        # A changed reward function makes a different run; the path of its file does not matter.
        inputs={"reward_function": function, "reward_digest": data.reward.digest},
    )


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """The answers to one prompt and their rewards."""

    prompt: Sequence[int]
    answers: Sequence[SampledSequence]
    rewards: Sequence[float]

    def advantages(self) -> list[float]:
        """Return each reward minus the mean of the group."""
        mean = fmean(self.rewards)
        return [reward - mean for reward in self.rewards]

    @property
    def has_signal(self) -> bool:
        """True if the rewards differ."""
        return len(set(self.rewards)) > 1


class RlMethod(RecipeMethod[RlPlan, PromptRow]):
    """Policy gradient with group-relative advantages."""

    def __init__(
        self,
        context: RecipeContext[RlPlan],
        rows: JsonlFile[PromptRow],
        reference_path: str | None = None,
        *,
        reward: RewardFunction,
    ) -> None:
        super().__init__(context, rows, reference_path)
        self._reward = reward

    def submit(self, step: int, adam: AdamParams) -> SubmittedStep:
        """Sample answers with the current weights, compute rewards and submit the update."""
        plan, training = self.context.plan, self.context.training
        batch = self.batch(step)
        groups = self._sample_groups(self.rows, batch.rows, plan.group_size, step)
        useful = [group for group in groups if group.has_signal]
        num_without_signal = len(groups) - len(useful)
        metrics = {**_mean_metrics(groups), "groups_without_signal": float(num_without_signal)}
        if not useful:
            notice = f"step {step + 1} has no signal: the rewards of every group are equal"
            self.context.notices.add("steps without signal", notice)
            return SubmittedStep(batch.epoch, metrics=metrics)
        num_learned = sum(len(answer.tokens) for group in useful for answer in group.answers)
        data = [datum for group in useful for datum in group_data(group, 1.0 / num_learned)]
        return SubmittedStep(
            batch.epoch,
            sum(datum.model_input.length for datum in data),
            self.submit_regularized(data, policy_loss(plan.loss))
            if plan.regularizers
            else training.forward_backward(data, plan.loss),
            training.optim_step(adam),
            metrics=metrics,
            compute_metrics=partial(_step_metrics, data),
        )

    def evaluate(self, rows: JsonlFile[PromptRow]) -> dict[str, float]:
        """Compute the mean reward of one answer per prompt."""
        groups: list[AnswerGroup] = []
        for numbers in iter_batches(len(rows), self.context.plan.batch_size):
            groups += self._sample_groups(rows, numbers, 1, "eval")
        return {f"eval_{name}": value for name, value in _mean_metrics(groups).items()}

    def _sample_groups(
        self, rows: JsonlFile[PromptRow], numbers: Sequence[int], num_answers: int, when: object
    ) -> list[AnswerGroup]:
        """Submit all samples at once, then compute rewards in order."""
        sampler = self.context.training.save_weights_and_get_sampling_client().result()
        submitted = []
        for number, row in zip(numbers, rows.read_rows(numbers), strict=True):
            prompt = self.context.renderer.render_prompt(row.prompt)
            if self._fits(rows.describe_location(number), prompt):
                seed = derive_seed(self.context.plan.seed, when, number)
                submitted.append(
                    (row, prompt, self._sample_answers(sampler, prompt, num_answers, seed))
                )
        return [
            self._compute_rewards(row, prompt, future.result()) for row, prompt, future in submitted
        ]

    def _sample_answers(
        self, sampler: SamplingClient, prompt: Sequence[int], num_answers: int, seed: int
    ) -> APIFuture[SampleResponse]:
        plan = self.context.plan
        params = SamplingParams(
            max_tokens=plan.answer_tokens, temperature=plan.temperature, seed=seed
        )
        return sampler.sample(ModelInput.from_ints(prompt), num_answers, params)

    def _compute_rewards(
        self, row: PromptRow, prompt: Sequence[int], response: SampleResponse
    ) -> AnswerGroup:
        answers = [answer for answer in response.sequences if answer.tokens]
        texts = [self.context.renderer.decode(answer.tokens) for answer in answers]
        return AnswerGroup(prompt, answers, [self._reward(row.fields, text) for text in texts])

    def _fits(self, place: str, prompt: Sequence[int]) -> bool:
        limit = self.context.renderer.max_tokens
        if limit is None or len(prompt) + self.context.plan.answer_tokens <= limit:
            return True
        self.context.notices.add(
            "skipped prompts",
            f"{place} is skipped: {format_count(len(prompt), 'token')} and an answer of "
            f"{self.context.plan.answer_tokens} do not fit into {limit}",
        )
        return False


def group_data(group: AnswerGroup, scale: float) -> list[Datum]:
    """Convert a group to training data; answers with zero advantage are omitted."""
    return [
        _datum(group.prompt, answer, advantage * scale)
        for answer, advantage in zip(group.answers, group.advantages(), strict=True)
        if advantage != 0.0
    ]


def _datum(prompt: Sequence[int], answer: SampledSequence, advantage: float) -> Datum:
    """Build a datum: position i predicts token i + 1; prompt positions have zero advantage."""
    if answer.logprobs is None:
        raise APIResponseValidationError(None, None, "The samples have no log-probabilities")
    tokens = [*prompt, *answer.tokens]
    zeros = [0.0] * (len(prompt) - 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*zeros, *answer.logprobs],
            "advantages": [*zeros, *([advantage] * len(answer.tokens))],
        },
    )


def measure_kl(data: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    """Estimate the KL divergence from the sampling policy: mean of (log p - log q)^2 / 2.

    It is close to 0 as long as a step is on-policy.
    """
    gaps = [
        trained - sampled
        for datum, scored in zip(data, output.loss_fn_outputs, strict=True)
        if "logprobs" in scored
        for trained, sampled, advantage in zip(
            scored["logprobs"].tolist(),
            datum.loss_fn_inputs["logprobs"].tolist(),
            datum.loss_fn_inputs["advantages"].tolist(),
            strict=True,
        )
        if advantage
    ]
    return {"kl": fmean(gap * gap / 2 for gap in gaps)} if gaps else {}


def _step_metrics(data: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    return {**measure_kl(data, output), **select_metrics(output.metrics)}


def _mean_metrics(groups: Sequence[AnswerGroup]) -> dict[str, float]:
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [len(answer.tokens) for group in groups for answer in group.answers]
    return {"reward": fmean(rewards), "answer_tokens": fmean(lengths)} if rewards else {}
