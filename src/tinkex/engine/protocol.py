"""The interface between the worker and the engine that holds the weights.

An engine works on values, never on HTTP, SQL or futures. All methods are called from one thread. A
method either takes full effect or raises and changes nothing; `InvalidInput` is the user's fault,
any other error the engine's. Methods on several requests return each request's failure as a value,
so that one tenant's mistake does not affect another's work.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from tinkex.errors import InvalidInput, RequestErrorCategory, TinkexError
from tinkex.types import ForwardBackwardInput, ForwardBackwardOutput, SampleRequest, SampleResponse
from tinkex.types.optimizers import AdamParams, OptimParams
from tinkex.types.sampling import TopkRow


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A base model that an engine serves."""

    name: str
    """The name that clients use."""
    max_context_tokens: int
    """Context length for prompt and generated tokens."""
    arch: str = ""
    """The architecture's name."""
    vocab_size: int = 0
    """0 if unknown before the model is loaded."""
    tokenizer_id: str | None = None
    """The Hub id of the tokenizer; None means the model's name."""
    tokenizer_folder: str | None = None
    """The folder of the tokenizer files on the server; never sent to clients."""
    tokenizer_digest: str | None = None
    """The digest of the tokenizer files, if they are in the object store."""
    is_trainable: bool = True
    is_sampleable: bool = True


#: LoRA alpha of clients that do not choose one.
DEFAULT_ALPHA = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Everything that determines an adapter's initial weights and training."""

    base_model: str
    rank: int
    seed: int
    """Determines the initial weights; chosen when the adapter is requested, so it never changes."""
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    optimizer: Mapping[str, object] = field(default_factory=lambda: {"type": "adamw"})
    """The optimizer's type and settings, named as in `create_model`."""
    gradient_shards: int = 1
    """The number of parts of a batch whose gradients are added in a fixed tree, a power of two. It
    determines the bits of gradients, on any number of ranks that divides it."""
    alpha: float = DEFAULT_ALPHA
    """Numerator of the scale of the low-rank update."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    target_modules: tuple[str, ...] | None = None
    """Names of the adapted modules, matched like PEFT's by the end of a module's path; None means
    all modules of the trained kinds."""

    @property
    def scale(self) -> float:
        """The scale of the low-rank update."""
        return lora_scale(self.alpha, self.rank, use_rslora=self.use_rslora)


def lora_scale(alpha: float, rank: int, *, use_rslora: bool) -> float:
    """The scale of a low-rank update: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    return alpha / (sqrt(rank) if use_rslora else rank)


def matches_module(path: str, name: str) -> bool:
    """Whether a name of `target_modules` selects a module, by PEFT's rule."""
    return path == name or path.endswith(f".{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward or forward_backward of one adapter."""

    adapter_id: str
    request: ForwardBackwardInput
    is_forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSource:
    """What to sample from: a base model, with or without the adapter of a checkpoint."""

    base_model: str
    directory: Path | None = None
    key: str = ""
    """Identifies the weights in caches, wherever their files are; empty: identified by the file."""
    tenant_id: str = ""
    """The owner of the request; cached prompts are never shared between tenants."""


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """Why one of several requests failed, and whether the user or the server caused it."""

    message: str
    category: RequestErrorCategory = RequestErrorCategory.User


@dataclass(frozen=True, slots=True)
class Declined:
    """Why an engine that only samples leaves a sample to the engine of another group."""

    reason: str


class AdapterTooLarge(InvalidInput):
    """Training the adapter needs more memory than the budget of all adapters."""


class StepRefused(InvalidInput):
    """The gradient of a step is not finite; it was dropped, and nothing else changed."""


class EngineLost(TinkexError):
    """A process of the engine has died; the worker must restart."""

    category = RequestErrorCategory.Server


class FinishedSample(NamedTuple):
    """A finished sample request."""

    job_id: str
    outcome: SampleResponse | EngineFailure | Declined


class SampleProgress(NamedTuple):
    """New tokens of one sequence of a running sample."""

    job_id: str
    sequence: int
    """The index of the sequence."""
    offset: int
    """The number of tokens of the sequence before these."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    topk: tuple[TopkRow | None, ...] = ()
    """The most likely tokens at each position; empty if not requested."""


WriteSnapshot: TypeAlias = Callable[[Path], None]
"""Writes a copied state into an empty directory; may run on any thread."""


def check_adapter_size(engine: Engine, spec: AdapterSpec) -> None:
    """Raise AdapterTooLarge if an adapter can never fit into memory."""
    needed, budget = engine.training_bytes(spec), engine.max_adapter_bytes
    if needed > budget:
        raise AdapterTooLarge(
            f"training an adapter of rank {spec.rank} on {spec.base_model} needs {needed:,} bytes "
            f"of memory, but this server has {budget:,} bytes for adapters; use a lower rank, or "
            "ask the operator to raise adapter_bytes"
        )


def check_step_params(optimizer: Mapping[str, object], params: OptimParams) -> None:
    """Raise InvalidInput if the parameters of a step are not of the adapter's optimizer."""
    given = "adamw" if isinstance(params, AdamParams) else params.type
    wanted = optimizer.get("type")
    if given != wanted:
        raise InvalidInput(
            f"the step has parameters of {given!r}, but the adapter trains with {wanted!r}"
        )
    if given == "adamw" and not isinstance(params, AdamParams):
        raise InvalidInput("optimizer_params of type 'adamw' are not supported; send adam_params")


def not_in_memory_message(adapter_id: str) -> str:
    """The error for an adapter that the engine does not hold."""
    return f"adapter {adapter_id!r} is not in memory"


class PassRun(Protocol):
    """Passes in progress; they take effect when `step` returns the outcomes."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens computed by all steps except the last."""
        ...

    def step(self) -> Sequence[ForwardBackwardOutput | EngineFailure] | None:
        """Compute one micro-batch; returns None, or after the last one an outcome per pass."""
        ...

    def cancel(self) -> None:
        """Stop; no pass of this run takes effect."""
        ...


class Engine(Protocol):
    """Trains adapters and samples from them. Adapter ids are model ids."""

    def base_models(self) -> Sequence[BaseModel]:
        """The served base models."""
        ...

    # --- adapters ---------------------------------------------------------------------------
    def create(self, adapter_id: str, spec: AdapterSpec) -> None:
        """Create an adapter with a zero update: log-probabilities are the base model's."""
        ...

    def has_adapter(self, adapter_id: str) -> bool:
        """Whether the adapter is in memory."""
        ...

    def drop(self, adapter_id: str) -> None:
        """Remove an adapter from memory; unknown ids are ignored."""
        ...

    # --- memory of adapters -----------------------------------------------------------------
    def training_bytes(self, spec: AdapterSpec) -> int:
        """The maximum memory for training such an adapter; raises for an unknown base model."""
        ...

    @property
    def max_adapter_bytes(self) -> int:
        """The memory budget of all adapters together."""
        ...

    # --- training ---------------------------------------------------------------------------
    def start_passes(self, passes: Sequence[Pass]) -> PassRun:
        """Begin passes; each step of the result computes one micro-batch.

        A backward pass adds to its adapter's gradient when the run ends. Until then only
        `snapshot` may be called for the same adapters.
        """
        ...

    def optim_step(self, adapter_id: str, params: OptimParams) -> Mapping[str, float]:
        """Apply the accumulated gradient, clear it, and return metrics.

        `StepRefused` is the only error that changes state: it drops the gradient.
        """
        ...

    # --- checkpoints and snapshots -----------------------------------------------------------
    def save(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Write a PEFT adapter, and optionally the optimizer state, to an empty directory."""
        ...

    def load(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Load saved weights; raises InvalidInput if their shape does not match.

        Without the optimizer, its state is reset. The accumulated gradient is dropped.
        """
        ...

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        """Copy the complete state, including the gradient; the result writes it later."""
        ...

    def restore(self, adapter_id: str, spec: AdapterSpec, directory: Path) -> None:
        """Restore an adapter from its snapshot."""
        ...

    # --- sampling ---------------------------------------------------------------------------
    def start_sample(self, job_id: str, source: SamplerSource, request: SampleRequest) -> None:
        """Add a sample request to the batch; `step_samples` reports an invalid one."""
        ...

    def step_samples(self) -> Sequence[FinishedSample]:
        """Advance all running samples for a short time; return the finished ones."""
        ...

    def cancel_sample(self, job_id: str) -> int:
        """Cancel a sample request immediately; finished and unknown ids are ignored.

        Returns the number of tokens that were sampled for it, 0 if that is unknown.
        """
        ...

    def watch_sample(self, job_id: str) -> None:
        """Report a running sample from its first token on, again if it is watched already.

        Unknown ids are ignored. The watch ends with the sample.
        """
        ...

    def unwatch_sample(self, job_id: str) -> None:
        """Stop reporting a sample; unknown ids are ignored."""
        ...

    def sample_progress(self) -> Sequence[SampleProgress]:
        """Return the new tokens of watched samples that still run.

        Tokens of the last step of a sample may be missing: they are in its outcome.
        """
        ...

    @property
    def num_samples(self) -> int:
        """The number of running sample requests."""
        ...

    @property
    def max_samples(self) -> int:
        """The maximum number of running sample requests; the worker queues the others fairly."""
        ...

    def close(self) -> None:
        """Release all memory."""
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
        """The number of tokens computed by all steps except the last."""
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
        """Stop; no pass of this run takes effect."""
        self._steps.close()

    def finish(self) -> Sequence[PassOutcome]:
        """Compute all remaining micro-batches."""
        while (outcomes := self.step()) is None:
            pass
        return outcomes
