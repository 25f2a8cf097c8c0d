"""The fake engine: every verb of the protocol, with a table of numbers in place of a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tinkex.engine.checkpoints.metadata import check_compatible, read_metadata
from tinkex.engine.fake import storage
from tinkex.engine.fake.bigram import Bigram, BigramTrainer
from tinkex.engine.fake.limits import MAX_CONTEXT_TOKENS, check_spec, parse_step_params
from tinkex.engine.fake.sample_queue import FakeSampleQueue, FakeSamplerCache
from tinkex.engine.fake.scoring import run_pass
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
    SamplerSource,
    WriteSnapshot,
    check_adapter_size,
)
from tinkex.errors import CheckpointError, ConfigError, InvalidInput, RequestErrorCategory
from tinkex.types import AdamParams, SampleRequest
from tinkex.types.optimizers import OptimParams


class _FakeAdapter(NamedTuple):
    spec: AdapterSpec
    trainer: BigramTrainer


DEFAULT_MODELS = ("tinkex/bigram",)
#: Sample requests inside the engine at once.
MAX_SAMPLES = 4
#: Memory for adapters: many, because each is one small table.
MAX_ADAPTER_BYTES = 1 << 30
#: An adapter's table, its gradient and two moments.
_NUM_TABLES = 4


class FakeEngine:
    """Serves bigram models: exact gradients, real files, the same bits on every run.

    A model is named NAME, or NAME=SIZE with the size of its vocabulary, whose square each
    operation costs. `seconds_per_op` makes every pass, step and sample request take that much
    longer, as a busy engine would; a pass takes it once per `step_tokens` tokens.
    """

    def __init__(
        self,
        models: Sequence[str] = DEFAULT_MODELS,
        *,
        seconds_per_op: float = 0.0,
        max_adapter_bytes: int = MAX_ADAPTER_BYTES,
        step_tokens: int = 1024,
    ) -> None:
        self._step_tokens = step_tokens
        self._bases = dict(_parse_model_name(name) for name in models)
        self._seconds_per_op = seconds_per_op
        self._max_adapter_bytes = max_adapter_bytes
        self._adapters: dict[str, _FakeAdapter] = {}
        self._sampler_cache = FakeSamplerCache(self._bases)
        self._sample_queue = FakeSampleQueue(self._sampler_cache, seconds_per_op)

    def base_models(self) -> Sequence[BaseModel]:
        """What is served."""
        return [
            BaseModel(
                name=name,
                max_context_tokens=MAX_CONTEXT_TOKENS,
                arch="bigram",
                vocab_size=base.vocab_size,
            )
            for name, base in self._bases.items()
        ]

    # --- adapters ---------------------------------------------------------------------------
    def create(self, adapter_id: str, spec: AdapterSpec) -> None:
        """Make a new adapter, which is its base model; one of the same id is made anew."""
        check_spec(spec)
        check_adapter_size(self, spec)
        self._adapters[adapter_id] = _FakeAdapter(
            spec, BigramTrainer(self._get_base(spec.base_model))
        )

    def has_adapter(self, adapter_id: str) -> bool:
        """Whether the adapter is in memory."""
        return adapter_id in self._adapters

    def drop(self, adapter_id: str) -> None:
        """Forget an adapter's memory; one that is not there is no error."""
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
        """Begin passes; a refused one adds nothing to its adapter's gradient."""
        return GeneratorPassRun(self._run_passes(passes))

    def run_passes(self, passes: Sequence[Pass]) -> Sequence[PassOutcome]:
        """Run passes to their end."""
        return self.start_passes(passes).finish()

    def _run_passes(self, passes: Sequence[Pass]) -> PassSteps:
        """Take the time of every micro-batch, and compute all passes in the last step."""
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
                _not_in_memory_message(request_pass.adapter_id), RequestErrorCategory.Server
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
        """Apply the gathered gradient, clear it, and report metrics."""
        spec, trainer = self._get_adapter(adapter_id)
        size = parse_step_params(spec.optimizer, params)
        self._sleep_per_op()
        is_adamw = isinstance(params, AdamParams)
        return trainer.adamw_step(size) if is_adamw else trainer.momentum_step(size)

    # --- what is kept on disk ----------------------------------------------------------------
    def save(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Write a PEFT-like adapter, and what an optimizer needs to go on."""
        spec, trainer = self._get_adapter(adapter_id)
        storage.write_checkpoint(directory, spec, trainer, with_optimizer=with_optimizer)

    def load(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Go on from saved weights, if they fit; the gathered gradient is dropped."""
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
        """Copy the whole state; tables are never changed in place, so the copy is references."""
        spec, trainer = self._get_adapter(adapter_id)
        copy = BigramTrainer(trainer.model, trainer.moments, trainer.gradient_VV)
        return partial(storage.write_snapshot, spec=spec, trainer=copy)

    def restore(self, adapter_id: str, spec: AdapterSpec, directory: Path) -> None:
        """Bring an adapter back as it was when its snapshot was taken."""
        size = self._get_base(spec.base_model).vocab_size
        trainer = storage.read_snapshot(directory, spec, size)
        self._adapters[adapter_id] = _FakeAdapter(spec, trainer)

    # --- sampling ---------------------------------------------------------------------------
    def start_sample(self, job_id: str, source: SamplerSource, request: SampleRequest) -> None:
        """Let a sample request wait for its turn; a bad one is reported by `step_samples`."""
        self._sample_queue.add(job_id, source, request)

    def step_samples(self) -> Sequence[FinishedSample]:
        """Go a short way with the oldest samples, and hand out those that are over."""
        return self._sample_queue.step()

    def cancel_sample(self, job_id: str) -> None:
        """Forget a sample request; one that is over or unknown is no error."""
        self._sample_queue.cancel(job_id)

    @property
    def num_samples(self) -> int:
        """How many sample requests are not over."""
        return len(self._sample_queue)

    @property
    def max_samples(self) -> int:
        """Few: they run one after the other, so those inside keep others from their turn."""
        return MAX_SAMPLES

    def close(self) -> None:
        """Forget everything."""
        self._adapters.clear()
        self._sample_queue.clear()
        self._sampler_cache.clear()

    # --- inside -----------------------------------------------------------------------------
    def _get_base(self, name: str) -> Bigram:
        base = self._bases.get(name)
        if base is None:
            raise InvalidInput(f"base model {name!r} is not one of {', '.join(self._bases)}")
        return base

    def _get_adapter(self, adapter_id: str) -> _FakeAdapter:
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            raise LookupError(_not_in_memory_message(adapter_id))
        return adapter

    def _sleep_per_op(self) -> None:
        if self._seconds_per_op > 0.0:
            time.sleep(self._seconds_per_op)


def _micro_batch_tokens(passes: Sequence[Pass], step_tokens: int) -> list[int]:
    """How many tokens the steps of some passes have; a pass takes at least one."""
    lengths = [sum(datum.model_input.length for datum in each.request.data) for each in passes]
    return [
        min(step_tokens, num_tokens - start)
        for num_tokens in lengths or [0]
        for start in range(0, max(num_tokens, 1), step_tokens)
    ]


def _parse_model_name(text: str) -> tuple[str, Bigram]:
    name, has_size, size = text.partition("=")
    if not name or (has_size and not (size.isdecimal() and int(size) > 1)):
        raise ConfigError(f"model is {text!r}; the fake engine takes NAME or NAME=VOCABULARY_SIZE")
    return name, Bigram.base(name, int(size) if size else VOCAB_SIZE)


def _not_in_memory_message(adapter_id: str) -> str:
    return f"adapter {adapter_id!r} is not in memory"
