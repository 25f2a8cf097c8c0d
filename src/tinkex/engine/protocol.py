"""What the worker may ask of whoever holds the weights.

An engine knows values, never HTTP, SQL or promises. All verbs are called from one thread. A verb
either takes effect whole or raises and changes nothing; `InvalidInput` is the user's fault,
anything else the engine's. Verbs on many requests at once report each request's own failure as a
value, so that one tenant's mistake never touches another's work.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from tinkex.errors import InvalidInput, RequestErrorCategory
from tinkex.types import ForwardBackwardInput, ForwardBackwardOutput, SampleRequest, SampleResponse
from tinkex.types.optimizers import OptimParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A base model that an engine serves."""

    name: str
    """What clients call it."""
    max_context_tokens: int
    """The most tokens it can read and write together."""
    arch: str = ""
    """The architecture's name."""
    vocab_size: int = 0
    """How many tokens it knows; 0 if that is known only once it is loaded."""
    tokenizer_id: str | None = None
    """What clients load the tokenizer by; None is the model's name."""
    tokenizer_folder: str | None = None
    """Where the tokenizer's files are on the server; never sent to clients."""
    is_trainable: bool = True
    is_sampleable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Everything that decides an adapter's first weights and how it is trained."""

    base_model: str
    rank: int
    seed: int
    """Decides the first weights; chosen before the adapter is promised, so it never changes."""
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"type": "adamw"})
    """The optimizer's type and settings, as `create_model` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward or forward_backward of one adapter."""

    adapter_id: str
    request: ForwardBackwardInput
    is_forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSource:
    """What to sample from: a base model, with the adapter in a checkpoint directory or alone."""

    base_model: str
    directory: Path | None = None
    tenant_id: str = ""
    """Whose prompts may be recognised in this request's; they are never shared between scopes."""


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """Why one request of several failed, and whose fault it was."""

    message: str
    category: RequestErrorCategory = RequestErrorCategory.User


class AdapterTooLarge(InvalidInput):
    """Training the adapter takes more memory than the budget of all adapters."""


class StepRefused(InvalidInput):
    """A step's gradient is not finite: it was dropped, which is a change, and nothing else was."""


class FinishedSample(NamedTuple):
    """A sample request that is over."""

    job_id: str
    outcome: SampleResponse | EngineFailure


WriteSnapshot: TypeAlias = Callable[[Path], None]
"""Writes a copied state into an empty directory; may run on any thread."""


def check_adapter_size(engine: Engine, spec: AdapterSpec) -> None:
    """Refuse an adapter that could never be in memory; raises as `training_bytes` does."""
    needed, budget = engine.training_bytes(spec), engine.max_adapter_bytes
    if needed > budget:
        raise AdapterTooLarge(
            f"training an adapter of rank {spec.rank} on {spec.base_model} takes {needed:,} bytes "
            f"of memory, and this server has {budget:,} bytes for adapters; use a lower rank, or "
            "ask the operator to raise adapter_bytes"
        )


class PassRun(Protocol):
    """Passes in progress; none of them takes effect before `step` returns the outcomes."""

    @property
    def num_tokens(self) -> int:
        """How many tokens the steps so far have computed, without the last step."""
        ...

    def step(self) -> Sequence[ForwardBackwardOutput | EngineFailure] | None:
        """Compute one micro-batch; returns one outcome per pass after the last, None before."""
        ...

    def cancel(self) -> None:
        """Stop here; no pass of this run takes effect."""
        ...


class Engine(Protocol):
    """The verbs. An adapter is named by its model id."""

    def base_models(self) -> Sequence[BaseModel]:
        """What is served."""
        ...

    # --- adapters ---------------------------------------------------------------------------
    def create(self, adapter_id: str, spec: AdapterSpec) -> None:
        """Make a new adapter that changes no log-probability yet."""
        ...

    def has_adapter(self, adapter_id: str) -> bool:
        """Whether the adapter is in memory."""
        ...

    def drop(self, adapter_id: str) -> None:
        """Forget an adapter's memory; one that is not there is no error."""
        ...

    # --- memory of adapters -----------------------------------------------------------------
    def training_bytes(self, spec: AdapterSpec) -> int:
        """The most memory that training such an adapter takes; raises for an unknown model."""
        ...

    @property
    def max_adapter_bytes(self) -> int:
        """The memory budget of all adapters together."""
        ...

    # --- training ---------------------------------------------------------------------------
    def start_passes(self, passes: Sequence[Pass]) -> PassRun:
        """Begin passes; each step of the result computes a micro-batch of them.

        A backward pass adds to its adapter's gradient when the run ends, and not before. Until
        then no other verb may be called for the same adapters, except `snapshot`.
        """
        ...

    def optim_step(self, adapter_id: str, params: OptimParams) -> Mapping[str, float]:
        """Apply the gathered gradient, clear it, and report metrics.

        `StepRefused` is the one error that leaves a change behind.
        """
        ...

    # --- what is kept on disk ----------------------------------------------------------------
    def save(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Write a PEFT adapter, and what an optimizer needs to go on, into an empty directory."""
        ...

    def load(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Go on from saved weights; a shape that does not fit is the user's fault.

        Without the optimizer, its memory starts afresh; a gathered gradient is dropped.
        """
        ...

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        """Copy the whole state now, gradient included; the result writes it later."""
        ...

    def restore(self, adapter_id: str, spec: AdapterSpec, directory: Path) -> None:
        """Bring an adapter back as it was when its snapshot was taken."""
        ...

    # --- sampling ---------------------------------------------------------------------------
    def start_sample(self, job_id: str, source: SamplerSource, request: SampleRequest) -> None:
        """Take a sample request into the running batch; a bad one is reported by `step_samples`."""
        ...

    def step_samples(self) -> Sequence[FinishedSample]:
        """Go a short way with all running samples, and hand out those that are over."""
        ...

    def cancel_sample(self, job_id: str) -> None:
        """Free a sample's place at once; one that is over or unknown is no error."""
        ...

    @property
    def num_samples(self) -> int:
        """How many sample requests are running."""
        ...

    @property
    def max_samples(self) -> int:
        """How many sample requests can run at once; more wait outside, where tenants take turns."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


PassOutcome: TypeAlias = ForwardBackwardOutput | EngineFailure
PassSteps: TypeAlias = Generator[int, None, Sequence[PassOutcome]]
"""Yields the number of tokens of each micro-batch but the last; returns one outcome per pass."""


class GeneratorPassRun:
    """Runs a generator of micro-batches step by step."""

    def __init__(self, steps: PassSteps) -> None:
        self._steps = steps
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens the steps so far have computed, without the last step."""
        return self._num_tokens

    def step(self) -> Sequence[PassOutcome] | None:
        """Compute one micro-batch; returns the outcomes after the last one."""
        try:
            self._num_tokens += next(self._steps)
        except StopIteration as end:
            outcomes: Sequence[PassOutcome] = end.value
            return outcomes
        return None

    def cancel(self) -> None:
        """Stop here; no pass of this run takes effect."""
        self._steps.close()

    def finish(self) -> Sequence[PassOutcome]:
        """Compute all that is left."""
        while (outcomes := self.step()) is None:
            pass
        return outcomes
