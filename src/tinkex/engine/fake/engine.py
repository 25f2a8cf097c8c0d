"""The fake engine: implements the whole engine protocol with a bigram table as the model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tinkex.engine.checkpoints.metadata import check_compatible, read_metadata
from tinkex.engine.fake import storage
from tinkex.engine.fake.bigram import Bigram, BigramTrainer, OptimStepParams, run_pass
from tinkex.engine.fake.sample_queue import MAX_CONTEXT_TOKENS, FakeSampleQueue, FakeSamplerCache
from tinkex.engine.fake.scripted import ScriptedText
from tinkex.engine.fake.toy_tokenizer import VOCAB_SIZE
from tinkex.engine.protocol import (
    AdapterSpec,
    BaseModel,
    EngineFailure,
    FinishedSample,
    GeneratorPassRun,
    Pass,
    PassOutcome,
    PassSteps,
    SampleProgress,
    SamplerSource,
    WriteSnapshot,
    check_adapter_size,
    check_step_params,
    not_in_memory_message,
)
from tinkex.errors import CheckpointError, ConfigError, InvalidInput, RequestErrorCategory
from tinkex.types import AdamParams, SampleRequest
from tinkex.types.optimizers import DimuonParams, OptimParams


class _FakeAdapter(NamedTuple):
    spec: AdapterSpec
    trainer: BigramTrainer


DEFAULT_MODELS = ("tinkex/bigram",)
#: Maximum number of concurrent sample requests.
MAX_SAMPLES = 4
#: Memory for adapters, which are small tables.
MAX_ADAPTER_BYTES = 1 << 30
OPTIMIZERS = ("adamw", "dimuon")
#: Weights, gradient and two moments.
_NUM_TABLES = 4


class FakeEngine:
    """Serves bigram models: exact gradients, real files, bit-identical on every run.

    A model is given as NAME or NAME=VOCABULARY_SIZE; operations cost the square of that size. A
    model given as NAME=FOLDER has the tokenizer of that folder and can be scripted, see `scripted`.
    `seconds_per_op` delays every pass, step and sample request, like a busy engine; a pass is
    delayed once per `step_tokens` tokens. With `seconds_per_token`, samples are decoded together,
    a token at a time.
    """

    def __init__(
        self,
        models: Sequence[str] = DEFAULT_MODELS,
        *,
        seconds_per_op: float = 0.0,
        seconds_per_token: float = 0.0,
        max_adapter_bytes: int = MAX_ADAPTER_BYTES,
        step_tokens: int = 1024,
    ) -> None:
        self._step_tokens = step_tokens
        self._texts: dict[str, ScriptedText] = {}
        self._bases = dict(self._parse_model(name) for name in models)
        self._seconds_per_op = seconds_per_op
        self._interrupted = threading.Event()
        self._max_adapter_bytes = max_adapter_bytes
        self._adapters: dict[str, _FakeAdapter] = {}
        self._sampler_cache = FakeSamplerCache(self._bases, self._texts)
        sleep = self._sleep_per_op if seconds_per_op > 0.0 else None
        decode_sleep = partial(self._sleep, seconds_per_token) if seconds_per_token > 0.0 else None
        self._sample_queue = FakeSampleQueue(self._sampler_cache, sleep, decode_sleep)

    def base_models(self) -> Sequence[BaseModel]:
        """The served base models."""
        return [
            BaseModel(
                name=name,
                max_context_tokens=MAX_CONTEXT_TOKENS,
                arch="bigram",
                vocab_size=base.vocab_size,
                tokenizer_folder=str(self._texts[name].folder) if name in self._texts else None,
            )
            for name, base in self._bases.items()
        ]

    # --- adapters ---------------------------------------------------------------------------
    def create(self, adapter_id: str, spec: AdapterSpec) -> None:
        """Create an adapter equal to its base model; replaces one with the same id."""
        _check_spec(spec)
        check_adapter_size(self, spec)
        self._adapters[adapter_id] = _FakeAdapter(
            spec, BigramTrainer(self._get_base(spec.base_model))
        )

    def has_adapter(self, adapter_id: str) -> bool:
        """Whether the adapter is in memory."""
        return adapter_id in self._adapters

    def drop(self, adapter_id: str) -> None:
        """Remove an adapter from memory; unknown ids are ignored."""
        self._adapters.pop(adapter_id, None)

    # --- memory of adapters -----------------------------------------------------------------
    def training_bytes(self, spec: AdapterSpec) -> int:
        """The memory of an adapter's tables."""
        return _NUM_TABLES * self._get_base(spec.base_model).logits_VV.nbytes

    @property
    def max_adapter_bytes(self) -> int:
        """The memory budget of all adapters together."""
        return self._max_adapter_bytes

    # --- training ---------------------------------------------------------------------------
    def start_passes(self, passes: Sequence[Pass]) -> GeneratorPassRun:
        """Begin passes; a rejected one adds nothing to its adapter's gradient."""
        return GeneratorPassRun(self._run_passes(passes))

    def run_passes(self, passes: Sequence[Pass]) -> Sequence[PassOutcome]:
        """Run passes to completion."""
        return self.start_passes(passes).finish()

    def _run_passes(self, passes: Sequence[Pass]) -> PassSteps:
        """Sleep once per micro-batch, and compute all passes in the last step."""
        *earlier, _ = _micro_batch_tokens(passes, self._step_tokens)
        for num_tokens in earlier:
            self._sleep_per_op()
            yield num_tokens
        self._sleep_per_op()
        return [self._run_pass(each) for each in passes]

    def _run_pass(self, request_pass: Pass) -> PassOutcome:
        adapter = self._adapters.get(request_pass.adapter_id)
        if adapter is None:
            return EngineFailure(
                not_in_memory_message(request_pass.adapter_id), RequestErrorCategory.Server
            )
        try:
            return run_pass(
                adapter.trainer,
                request_pass.request,
                forward_only=request_pass.is_forward_only,
                max_context_tokens=MAX_CONTEXT_TOKENS,
            )
        except InvalidInput as error:
            return EngineFailure(error.message)

    def optim_step(self, adapter_id: str, params: OptimParams) -> Mapping[str, float]:
        """Apply the accumulated gradient, clear it, and return metrics."""
        spec, trainer = self._get_adapter(adapter_id)
        step_params = _parse_step_params(spec.optimizer, params)
        self._sleep_per_op()
        is_adamw = isinstance(params, AdamParams)
        return trainer.adamw_step(step_params) if is_adamw else trainer.momentum_step(step_params)

    # --- checkpoints and snapshots -----------------------------------------------------------
    def save(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Write a PEFT-like adapter, and optionally the optimizer state."""
        spec, trainer = self._get_adapter(adapter_id)
        storage.write_checkpoint(directory, spec, trainer, with_optimizer=with_optimizer)

    def load(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Load saved weights, if they match; the accumulated gradient is dropped."""
        spec, trainer = self._get_adapter(adapter_id)
        try:
            check_compatible(read_metadata(directory), spec)
            size = trainer.model.vocab_size
            model = storage.read_model(directory, size)
            moments = storage.read_moments(directory, spec, size) if with_optimizer else None
        except CheckpointError as error:
            raise InvalidInput(f"the checkpoint cannot be loaded: {error.message}") from error
        trainer.load(model, moments)

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        """Copy the complete state; tables are never modified in place, so references are enough."""
        spec, trainer = self._get_adapter(adapter_id)
        copy = BigramTrainer(trainer.model, trainer.moments, trainer.gradient_VV)
        return partial(storage.write_snapshot, spec=spec, trainer=copy)

    def restore(self, adapter_id: str, spec: AdapterSpec, directory: Path) -> None:
        """Restore an adapter from its snapshot."""
        size = self._get_base(spec.base_model).vocab_size
        trainer = storage.read_snapshot(directory, spec, size)
        self._adapters[adapter_id] = _FakeAdapter(spec, trainer)

    # --- sampling ---------------------------------------------------------------------------
    def start_sample(self, job_id: str, source: SamplerSource, request: SampleRequest) -> None:
        """Queue a sample request; `step_samples` reports an invalid one."""
        self._sample_queue.add(job_id, source, request)

    def step_samples(self) -> Sequence[FinishedSample]:
        """Advance the oldest samples for a short time; return the finished ones."""
        return self._sample_queue.step()

    def cancel_sample(self, job_id: str) -> int:
        """Cancel a sample request; returns the number of its decoded tokens."""
        return self._sample_queue.cancel(job_id)

    def watch_sample(self, job_id: str) -> None:
        """Report a sample from its first token on; unknown ids are ignored."""
        self._sample_queue.watch(job_id)

    def unwatch_sample(self, job_id: str) -> None:
        """Stop reporting a sample; unknown ids are ignored."""
        self._sample_queue.watches.unwatch(job_id)

    def sample_progress(self) -> Sequence[SampleProgress]:
        """Return the new tokens of watched samples; they are partial with `seconds_per_token`."""
        return self._sample_queue.progress()

    @property
    def num_samples(self) -> int:
        """The number of unfinished sample requests."""
        return len(self._sample_queue)

    @property
    def max_samples(self) -> int:
        """Small, because samples run one after another and the worker queues the rest fairly."""
        return MAX_SAMPLES

    def interrupt(self) -> None:
        """End the wait of `seconds_per_op` now and skip all later ones; from any thread."""
        self._interrupted.set()

    def close(self) -> None:
        """Release all memory."""
        self._adapters.clear()
        self._sample_queue.clear()
        self._sampler_cache.clear()

    # --- helpers ----------------------------------------------------------------------------
    def _parse_model(self, text: str) -> tuple[str, Bigram]:
        name, has_value, value = text.partition("=")
        if name and "/" in value:
            scripted = self._texts[name] = ScriptedText(Path(value))
            return name, Bigram.base(name, scripted.vocab_size)
        if not name or (has_value and not (value.isdecimal() and int(value) > 1)):
            raise ConfigError(
                f"model is {text!r}; the fake engine takes NAME, NAME=VOCABULARY_SIZE or "
                "NAME=FOLDER"
            )
        return name, Bigram.base(name, int(value) if value else VOCAB_SIZE)

    def _get_base(self, name: str) -> Bigram:
        base = self._bases.get(name)
        if base is None:
            raise InvalidInput(f"base model {name!r} is not one of {', '.join(self._bases)}")
        return base

    def _get_adapter(self, adapter_id: str) -> _FakeAdapter:
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            raise LookupError(not_in_memory_message(adapter_id))
        return adapter

    def _sleep_per_op(self) -> None:
        if self._seconds_per_op > 0.0:
            self._sleep(self._seconds_per_op)

    def _sleep(self, seconds: float) -> None:
        self._interrupted.wait(seconds)


def _check_spec(spec: AdapterSpec) -> None:
    """Raise InvalidInput if the engine cannot create such an adapter."""
    if spec.rank < 1:
        raise InvalidInput(f"rank is {spec.rank}, expected at least 1")
    if not (spec.train_unembed or spec.train_mlp or spec.train_attn):
        raise InvalidInput(
            "train_unembed, train_mlp and train_attn are all false: nothing to train"
        )
    for name in spec.target_modules or ():
        if name != storage.MODULE_NAME:
            raise InvalidInput(
                f"target module {name!r} is not in the trained parts of the model, whose modules "
                f"are: {storage.MODULE_NAME}"
            )
    kind = spec.optimizer.get("type")
    if kind not in OPTIMIZERS:
        raise InvalidInput(f"optimizer type {kind!r} is not one of {', '.join(OPTIMIZERS)}")


def _parse_step_params(optimizer: Mapping[str, object], params: OptimParams) -> OptimStepParams:
    """Convert the parameters of a step, which must be of the adapter's optimizer type."""
    check_step_params(optimizer, params)
    if isinstance(params, AdamParams):
        return OptimStepParams(
            learning_rate=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            grad_clip_norm=params.grad_clip_norm,
        )
    assert isinstance(params, DimuonParams)
    return OptimStepParams(
        learning_rate=params.learning_rate,
        beta1=params.beta1,
        grad_clip_norm=params.grad_clip_norm,
    )


def _micro_batch_tokens(passes: Sequence[Pass], step_tokens: int) -> list[int]:
    """The number of tokens of each step; a pass has at least one step."""
    lengths = [sum(datum.model_input.length for datum in each.request.data) for each in passes]
    return [
        min(step_tokens, num_tokens - start)
        for num_tokens in lengths or [0]
        for start in range(0, max(num_tokens, 1), step_tokens)
    ]
