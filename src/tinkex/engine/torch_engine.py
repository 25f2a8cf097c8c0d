"""The engine that trains and samples with PyTorch in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tinkex.engine.adapters import (
    AdapterState,
    TrainableAdapter,
    build_layout,
    check_spec,
    create_adapter,
    training_bytes,
)
from tinkex.engine.checkpoints import adapter_files
from tinkex.engine.checkpoints.adapter_files import read_snapshot, write_snapshot
from tinkex.engine.config import EngineConfig
from tinkex.engine.examples import parse_examples
from tinkex.engine.memory_limits import machine_memory_bytes
from tinkex.engine.models.loading import LoadedModel, compute_device
from tinkex.engine.models.registry import ModelRegistry
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
    not_in_memory_message,
)
from tinkex.engine.sampler_cache import CacheKey, SamplerCache
from tinkex.engine.sampling.continuous_batching import ContinuousBatcher
from tinkex.engine.sampling.request_state import SamplerAdapter
from tinkex.engine.shard_run import PassWork
from tinkex.engine.trainer import Trainer, optimizer_step
from tinkex.errors import CheckpointError, InvalidInput, RequestErrorCategory, TinkexError
from tinkex.types import SampleRequest
from tinkex.types.optimizers import OptimParams

if TYPE_CHECKING:
    from tinkex.engine.parallel.leader import FollowerGroup
    from tinkex.nn.hosted_model import HostedModel


class TorchEngine:
    """Serves base models, trains adapters on them, and samples from both.

    `sources` has the location of each base model, by name. `followers` are the other ranks, which
    this engine closes.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        config: EngineConfig | None = None,
        followers: FollowerGroup | None = None,
    ) -> None:
        self._config = config or EngineConfig()
        self._followers = followers
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        self._adapters: dict[str, TrainableAdapter] = {}
        self._batchers: dict[str, ContinuousBatcher] = {}
        self._sample_seconds: dict[str, float] = {}
        """The time spent on the samples of each busy base model."""
        self._rejected_samples: list[FinishedSample] = []
        self._registry = ModelRegistry(
            sources,
            self._config,
            self._is_busy,
            self._drop_batcher,
            followers.host if followers is not None else None,
        )
        self._sampler_adapters: SamplerCache[SamplerAdapter] = SamplerCache(
            self._config.sampler_bytes
        )

    def base_models(self) -> Sequence[BaseModel]:
        """The served base models."""
        return self._registry.base_models()

    def replace_models(self, sources: Mapping[str, str]) -> None:
        """Serve these base models from now on; those in use by adapters or samples stay loaded."""
        in_use = {adapter.spec.base_model for adapter in self._adapters.values()}
        in_use |= set(filter(self._is_busy, self._batchers))
        self._registry.replace_sources(sources, in_use)
        if self._followers is not None:
            self._followers.replace_models(sources, in_use)

    # --- adapters ---------------------------------------------------------------------------
    def create(self, adapter_id: str, spec: AdapterSpec) -> None:
        """Create an adapter with a zero update: log-probabilities are the base model's."""
        check_adapter_size(self, spec)
        self._adapters[adapter_id] = create_adapter(
            self._registry.get(spec.base_model).hosted_model, spec
        )

    def has_adapter(self, adapter_id: str) -> bool:
        """Whether the adapter is in memory."""
        return adapter_id in self._adapters

    def drop(self, adapter_id: str) -> None:
        """Remove an adapter from memory; unknown ids are ignored."""
        self._adapters.pop(adapter_id, None)
        if self._followers is not None:
            self._followers.drop(adapter_id)

    # --- memory of adapters -----------------------------------------------------------------
    def training_bytes(self, spec: AdapterSpec) -> int:
        """The maximum memory for training such an adapter."""
        check_spec(spec)
        hosted_model = self._registry.get(spec.base_model).hosted_model
        return training_bytes(build_layout(hosted_model, spec), spec.gradient_shards)

    @property
    def max_adapter_bytes(self) -> int:
        """The memory budget of all adapters together."""
        config = self._config
        return config.adapter_bytes or _device_memory_bytes(config) // (4 * config.num_engines)

    # --- training ---------------------------------------------------------------------------
    def start_passes(self, passes: Sequence[Pass]) -> GeneratorPassRun:
        """Begin passes; those on one base model are computed together."""
        return GeneratorPassRun(self._run_passes(passes))

    def run_passes(self, passes: Sequence[Pass]) -> Sequence[PassOutcome]:
        """Run passes to completion."""
        return self.start_passes(passes).finish()

    def _run_passes(self, passes: Sequence[Pass]) -> PassSteps:
        outcomes: dict[int, PassOutcome] = {}
        by_model: dict[str, list[int]] = {}
        for index, request_pass in enumerate(passes):
            adapter = self._adapters.get(request_pass.adapter_id)
            if adapter is None:
                reason = not_in_memory_message(request_pass.adapter_id)
                outcomes[index] = EngineFailure(reason, RequestErrorCategory.Server)
            else:
                by_model.setdefault(adapter.spec.base_model, []).append(index)
        for base_model, indices in by_model.items():
            on_model = yield from self._run_on_model(base_model, [passes[i] for i in indices])
            outcomes.update(zip(indices, on_model, strict=True))
        return [outcomes[index] for index in range(len(passes))]

    def _run_on_model(self, base_model: str, passes: Sequence[Pass]) -> PassSteps:
        try:
            parsed = [self._parse_pass(each, self._registry.get(base_model)) for each in passes]
        except TinkexError as error:
            return [EngineFailure(error.message, error.category)] * len(passes)
        works = [work for work in parsed if isinstance(work, PassWork)]
        # Between two micro-batches the model may be evicted, so it is looked up every time.
        trainer = Trainer(
            base_model,
            lambda: self._registry.get(base_model).hosted_model,
            self._config,
            self._followers,
        )
        outcomes = iter((yield from trainer.run(works)))
        return [next(outcomes) if isinstance(work, PassWork) else work for work in parsed]

    def _parse_pass(self, request_pass: Pass, model: LoadedModel) -> PassWork | EngineFailure:
        try:
            examples = parse_examples(
                request_pass.request,
                vocab_size=model.hosted_model.vocab_size,
                max_context_tokens=model.max_context_tokens,
            )
        except InvalidInput as error:
            return EngineFailure(error.message, error.category)
        adapter = self._adapters[request_pass.adapter_id]
        return PassWork(
            request_pass.adapter_id,
            adapter,
            request_pass.request,
            dict(enumerate(examples)),
            request_pass.is_forward_only,
        )

    def optim_step(self, adapter_id: str, params: OptimParams) -> Mapping[str, float]:
        """Apply the accumulated gradient, clear it, and return metrics."""
        adapter = self._get_adapter(adapter_id)
        return optimizer_step(adapter, params, apply_nonfinite=self._config.is_nonfinite_applied)

    # --- checkpoints and snapshots -----------------------------------------------------------
    def save(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Write a PEFT adapter, and optionally the optimizer state, to an empty directory."""
        adapter = self._get_adapter(adapter_id)
        adapter_files.write_checkpoint(
            directory, adapter.spec, adapter.layout, adapter.state, with_optimizer=with_optimizer
        )

    def load(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Load saved weights, if they match; the accumulated gradient is dropped."""
        adapter = self._get_adapter(adapter_id)
        device = adapter.state.weights.device
        spec, layout = adapter.spec, adapter.layout
        try:
            state = AdapterState.from_weights(
                adapter_files.read_adapter_weights(directory, spec, layout)
            )
            if with_optimizer:
                optimizer = adapter_files.read_optimizer(directory, spec, layout)
                state.first, state.second, state.num_steps = optimizer
        except CheckpointError as error:
            raise InvalidInput(f"the checkpoint cannot be loaded: {error.message}") from error
        adapter.replace_state(state.to(device))

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        """Copy the complete state, including the gradient; the result writes it later."""
        adapter = self._get_adapter(adapter_id)
        return partial(
            write_snapshot,
            spec=adapter.spec,
            layout=adapter.layout,
            state=adapter.state.copy_to_cpu(),
        )

    def restore(self, adapter_id: str, spec: AdapterSpec, directory: Path) -> None:
        """Restore an adapter from its snapshot."""
        hosted_model = self._registry.get(spec.base_model).hosted_model
        layout = build_layout(hosted_model, spec)
        state = read_snapshot(directory, spec, layout).to(hosted_model.device)
        self._adapters[adapter_id] = TrainableAdapter(spec, layout, state)

    # --- sampling ---------------------------------------------------------------------------
    def start_sample(self, job_id: str, source: SamplerSource, request: SampleRequest) -> None:
        """Add a sample request to the batch; `step_samples` reports an invalid one."""
        try:
            model = self._registry.get(source.base_model)
            adapter = self._load_sampler_adapter(source, model.hosted_model)
        except TinkexError as error:
            self._rejected_samples.append(
                FinishedSample(job_id, EngineFailure(error.message, error.category))
            )
            return
        self._get_batcher(model).add(job_id, adapter, request, tenant_id=source.tenant_id)

    def step_samples(self) -> Sequence[FinishedSample]:
        """Advance the samples of one base model for a short time; return the finished ones.

        Chooses the base model whose samples have had the least time.
        """
        finished, self._rejected_samples = self._rejected_samples, []
        busy = [name for name, batcher in self._batchers.items() if len(batcher)]
        if finished or not busy:
            return finished
        known = [self._sample_seconds[name] for name in busy if name in self._sample_seconds]
        # A model that was idle starts with the least time of the others, not with zero.
        self._sample_seconds = {
            name: self._sample_seconds.get(name, min(known, default=0.0)) for name in busy
        }
        name = min(busy, key=self._sample_seconds.__getitem__)
        started = time.monotonic()
        finished = self._batchers[name].step()
        if self._followers is not None:
            self._followers.check()
        self._sample_seconds[name] += time.monotonic() - started
        return finished

    def cancel_sample(self, job_id: str) -> int:
        """Cancel a sample request immediately; returns the number of its tokens."""
        self._rejected_samples = [
            sample for sample in self._rejected_samples if sample.job_id != job_id
        ]
        return sum(batcher.cancel(job_id) for batcher in self._batchers.values())

    def watch_sample(self, job_id: str) -> None:
        """Report a sample from its first token on; unknown ids are ignored."""
        for batcher in self._batchers.values():
            batcher.watched.watch(job_id)

    def unwatch_sample(self, job_id: str) -> None:
        """Stop reporting a sample; unknown ids are ignored."""
        for batcher in self._batchers.values():
            batcher.watched.unwatch(job_id)

    def sample_progress(self) -> Sequence[SampleProgress]:
        """Return the new tokens of watched samples that still run."""
        return [
            each for batcher in self._batchers.values() for each in batcher.watched.take_progress()
        ]

    @property
    def num_samples(self) -> int:
        """The number of running sample requests."""
        return len(self._rejected_samples) + sum(map(len, self._batchers.values()))

    @property
    def max_samples(self) -> int:
        """The maximum number of sequences, because a request has at least one."""
        return self._config.max_sequences

    def check_ranks(self) -> None:
        """Raise EngineLost if another rank has died; may be called from another thread."""
        if self._followers is not None:
            self._followers.ping()

    def close(self) -> None:
        """Release all memory."""
        self._adapters.clear()
        self._batchers.clear()
        self._sampler_adapters.clear()
        self._registry.close()
        if self._followers is not None:
            self._followers.close()

    # --- helpers ----------------------------------------------------------------------------
    def _get_adapter(self, adapter_id: str) -> TrainableAdapter:
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            raise LookupError(not_in_memory_message(adapter_id))
        return adapter

    def _load_sampler_adapter(
        self, source: SamplerSource, hosted_model: HostedModel
    ) -> SamplerAdapter | None:
        """Return the adapter of a checkpoint, or None to sample from the base model alone."""
        directory = source.directory
        if directory is None:
            return None

        def load(key: CacheKey) -> tuple[SamplerAdapter, int]:
            targets = hosted_model.lora_targets
            saved = adapter_files.read_adapter(directory, source.base_model, targets)
            weights = saved.weights.to(hosted_model.device)
            adapter = SamplerAdapter(
                key=key,
                scale=saved.scale,
                weights=saved.layout.views(weights),
                dtype=hosted_model.dtype,
            )
            return adapter, weights.nbytes + adapter.num_bytes

        return self._sampler_adapters.get_or_load(directory, load, source.key)

    def _get_batcher(self, model: LoadedModel) -> ContinuousBatcher:
        batcher = self._batchers.get(model.name)
        if batcher is None:
            batcher = ContinuousBatcher(
                model.hosted_model,
                decoder=model.tokenizer,
                eos_tokens=model.eos_tokens,
                max_context_tokens=model.max_context_tokens,
                config=self._config,
            )
            self._batchers[model.name] = batcher
        return batcher

    def _drop_batcher(self, base_model: str) -> None:
        self._batchers.pop(base_model, None)

    def _is_busy(self, base_model: str) -> bool:
        batcher = self._batchers.get(base_model)
        return batcher is not None and len(batcher) > 0


def _device_memory_bytes(config: EngineConfig) -> int:
    device = compute_device(config)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory_bytes()
