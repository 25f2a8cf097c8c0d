"""What a fine-tune tells: a report per step, and its result."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tinkex.client.future import APIFuture
from tinkex.client.sampling import SamplingClient
from tinkex.client.service import ServiceClient
from tinkex.data.rendering import Renderer
from tinkex.data.rows import ChatRow, Prompt
from tinkex.errors import TinkexError
from tinkex.logs import get_logger
from tinkex.recipes.plan import Plan
from tinkex.types import ModelInput, SamplingParams
from tinkex.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step that is done."""

    step: int
    """How many steps are done."""
    total: int
    """How many there are."""
    epoch: int
    """Counted from 1."""
    loss: float | None
    """The mean loss; None if nothing could be learned from the step's rows."""
    learning_rate: float
    num_tokens: int
    """How many tokens the model read in this step."""
    tokens_per_second: float
    """The pace of the last few steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else was measured."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it, metrics among the rest."""
        told = asdict(self)
        metrics = told.pop("metrics")
        return {**told, **metrics}


class Throughput:
    """Tokens per second over the last steps: they arrive in bursts, so one alone says nothing."""

    def __init__(self, started_at: float, num_steps: int = 10) -> None:
        self._history: deque[tuple[float, int]] = deque([(started_at, 0)], maxlen=num_steps + 1)

    def update(self, now: float, num_tokens: int) -> float:
        """The pace after a step that was done now."""
        self._history.append((now, num_tokens))
        total = sum(tokens for _, tokens in list(self._history)[1:])
        return total / max(now - self._history[0][0], 1e-9)


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A prompt, and what the trained model answers."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeResult:
    """Where a run got to, and what it left behind."""

    is_complete: bool
    """False if it was stopped; the same command goes on."""
    step: int
    total: int
    run_dir: Path
    state_path: str | None = None
    """The tinker:// path of weights and optimizer."""
    sampler_path: str | None = None
    """The tinker:// path of weights to sample from; set when the run is complete."""
    loss: float | None = None
    """The loss of the last step that had one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What was measured at the end."""
    samples: tuple[SampledAnswer, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON has it."""
        return {**asdict(self), "run_dir": str(self.run_dir)}


_TEMPERATURE = 0.7


def choose_prompts(given: Sequence[str], first_row: Any) -> list[Prompt]:
    """The given prompts in the form the data has, or the prompt of its first row."""
    example = first_prompt(first_row)
    if not given:
        return [example]
    if isinstance(example, str):
        return list(given)
    return [({"role": "user", "content": text},) for text in given]


def first_prompt(row: Any) -> Prompt:
    """What stands in front of the first answer of a row."""
    if not isinstance(row, ChatRow):
        prompt: Prompt = row.prompt
        return prompt
    roles = [message["role"] for message in row.messages]
    # A conversation that the assistant begins still needs something to answer to.
    return row.messages[: roles.index("assistant")] or row.messages[:1]


def generate_samples(
    sampler: SamplingClient,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    tell: Callable[[str], None],
) -> tuple[SampledAnswer, ...]:
    """An answer to each prompt that has one; all are asked for at once."""
    params = SamplingParams(max_tokens=plan.sample_tokens, temperature=_TEMPERATURE, seed=plan.seed)
    asked = []
    for prompt in prompts:
        tokens = renderer.render_prompt(prompt)
        if not tokens or (
            renderer.max_tokens and len(tokens) + plan.sample_tokens > renderer.max_tokens
        ):
            tell(
                f"No sample: a prompt of {format_count(len(tokens), 'token')} leaves no room for "
                "an answer"
            )
        else:
            asked.append((prompt, sampler.sample(ModelInput.from_ints(tokens), 1, params)))
    found = []
    for prompt, future in asked:
        try:
            found.append(
                SampledAnswer(
                    prompt_text(prompt), renderer.decode(future.result().sequences[0].tokens)
                )
            )
        except TinkexError as error:
            tell(f"No sample: {error.message}")
    return tuple(found)


def prompt_text(prompt: Prompt) -> str:
    """A prompt as a person reads it: plain text, or the last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")


logger = get_logger(__name__)
#: Reports that may be on their way at once.
MAX_PENDING = 16
_DRAIN_SECONDS = 10.0


class MetricsReporter:
    """Reports metrics in the background until the server refuses them."""

    def __init__(self, service: ServiceClient) -> None:
        self._service = service
        self._pending: deque[APIFuture[Any]] = deque()
        self._is_refused = False

    def report(self, run_id: str, seq_id: int, metrics: Mapping[str, float]) -> None:
        """Report the metrics of one optimizer step; servers other than tinkex refuse the first."""
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_PENDING):
            self._finish(self._pending.popleft())
        if not self._is_refused:
            client = self._service.rest_client()
            self._pending.append(client.report_run_metrics(run_id, seq_id, metrics))

    def drain(self) -> None:
        """Wait for the reports that are on their way."""
        while self._pending:
            self._finish(self._pending.popleft())

    def _finish(self, future: APIFuture[Any]) -> None:
        try:
            future.result(_DRAIN_SECONDS)
        except (TinkexError, concurrent.futures.TimeoutError, TimeoutError) as error:
            self._is_refused = True
            logger.info("The server does not take metrics of this run: %s", error)
