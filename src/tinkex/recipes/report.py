"""Step reports, results, final samples and metric reporting of a run."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tinkex.client.future import APIFuture
from tinkex.client.sampling import SamplingClient
from tinkex.client.service import ServiceClient
from tinkex.data.rendering import Renderer
from tinkex.data.rows import ChatRow, Prompt, RecipeRow
from tinkex.display import format_count
from tinkex.errors import TinkexError
from tinkex.logs import get_logger
from tinkex.recipes.plan import Plan
from tinkex.types import ModelInput, SamplingParams
from tinkex.wire.messages import Empty


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Report of a finished step."""

    step: int
    """Number of finished steps."""
    total: int
    """Total number of steps."""
    epoch: int
    """Counted from 1."""
    loss: float | None
    """Mean loss; None if the step had no targets."""
    learning_rate: float
    num_tokens: int
    """Number of tokens in this step."""
    tokens_per_second: float
    """Throughput of the last steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics."""

    def to_dict(self) -> dict[str, object]:
        """Return the report as flat JSON, including the metrics."""
        record = asdict(self)
        metrics = record.pop("metrics")
        return {**record, **metrics}


class Throughput:
    """Tokens per second over the last steps; single steps are too noisy."""

    def __init__(self, started_at: float, num_steps: int = 10) -> None:
        self._history: deque[tuple[float, int]] = deque([(started_at, 0)], maxlen=num_steps + 1)

    def update(self, now: float, num_tokens: int) -> float:
        """Return the throughput after a step that finished at `now`."""
        self._history.append((now, num_tokens))
        total = sum(tokens for _, tokens in list(self._history)[1:])
        return total / max(now - self._history[0][0], 1e-9)


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A prompt and the answer of the trained model."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeResult:
    """Result of a run."""

    is_complete: bool
    """False if the run was stopped; the same command resumes it."""
    step: int
    total: int
    run_dir: Path
    state_path: str | None = None
    """tinker:// path of weights and optimizer state."""
    sampler_path: str | None = None
    """tinker:// path of the sampler weights; set when the run is complete."""
    loss: float | None = None
    """Loss of the last step that had one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Final metrics."""
    samples: tuple[SampledAnswer, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the result as plain JSON."""
        return {**asdict(self), "run_dir": str(self.run_dir)}


_TEMPERATURE = 0.7


def choose_prompts(given: Sequence[str], first_row: RecipeRow) -> list[Prompt]:
    """Return the given prompts in the format of the data, or the prompt of the first row."""
    example = first_prompt(first_row)
    if not given:
        return [example]
    if isinstance(example, str):
        return list(given)
    return [({"role": "user", "content": text},) for text in given]


def first_prompt(row: RecipeRow) -> Prompt:
    """Return the prompt of the first answer of a row."""
    if not isinstance(row, ChatRow):
        return row.prompt
    roles = [message["role"] for message in row.messages]
    # If the assistant starts the conversation, its first message is the prompt.
    return row.messages[: roles.index("assistant")] or row.messages[:1]


def generate_samples(
    sampler: SamplingClient,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    tell: Callable[[str], None],
) -> tuple[SampledAnswer, ...]:
    """Sample an answer to each prompt; prompts that are too long are skipped."""
    params = SamplingParams(max_tokens=plan.sample_tokens, temperature=_TEMPERATURE, seed=plan.seed)
    submitted = []
    for prompt in prompts:
        tokens = renderer.render_prompt(prompt)
        if not tokens or (
            renderer.max_tokens and len(tokens) + plan.sample_tokens > renderer.max_tokens
        ):
            tell(
                f"No sample: a prompt of {format_count(len(tokens), 'token')} is too long for "
                "an answer"
            )
        else:
            submitted.append((prompt, sampler.sample(ModelInput.from_ints(tokens), 1, params)))
    answers = []
    for prompt, future in submitted:
        try:
            answers.append(
                SampledAnswer(
                    prompt_text(prompt), renderer.decode(future.result().sequences[0].tokens)
                )
            )
        except TinkexError as error:
            tell(f"No sample: {error.message}")
    return tuple(answers)


def prompt_text(prompt: Prompt) -> str:
    """Return the text of a prompt, or the content of its last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")


logger = get_logger(__name__)
#: Maximum number of reports in flight.
MAX_PENDING = 16
_DRAIN_SECONDS = 10.0


class MetricsReporter:
    """Reports metrics in the background until the server rejects them."""

    def __init__(self, service: ServiceClient) -> None:
        self._service = service
        self._pending: deque[APIFuture[Empty]] = deque()
        self._is_rejected = False

    def report(self, run_id: str, seq_id: int, metrics: Mapping[str, float]) -> None:
        """Report the metrics of one optimizer step; servers other than tinkex reject the first."""
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_PENDING):
            self._finish(self._pending.popleft())
        if not self._is_rejected:
            client = self._service.rest_client()
            self._pending.append(client.report_run_metrics(run_id, seq_id, metrics))

    def drain(self) -> None:
        """Wait for the reports in flight."""
        while self._pending:
            self._finish(self._pending.popleft())

    def _finish(self, future: APIFuture[Empty]) -> None:
        try:
            future.result(_DRAIN_SECONDS)
        except (TinkexError, concurrent.futures.TimeoutError, TimeoutError) as error:
            self._is_rejected = True
            logger.info("The server does not accept metrics of this run: %s", error)
