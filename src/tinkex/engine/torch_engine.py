"""The engine that trains and samples on PyTorch, in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

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
from tinkex.engine.checkpoints.snapshots import read_snapshot, write_snapshot
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
    SamplerSource,
    StepRefused,
    WriteSnapshot,
    check_adapter_size,
)
from tinkex.engine.sampler_cache import SamplerAdapterCache
from tinkex.engine.sampling.continuous_batching import ContinuousBatcher
from tinkex.engine.trainer import PassWork, Trainer
from tinkex.errors import CheckpointError, InvalidInput, RequestErrorCategory, TinkexError
from tinkex.nn.adamw import NonFiniteGradient, adamw_step
from tinkex.types import AdamParams, SampleRequest
from tinkex.types.optimizers import OptimParams


class TorchEngine:
    """Serves the base models of some folders, and trains adapters on them.

    `sources` says where each model is by its name.
    """

    def __init__(self, sources: Mapping[str, str], config: EngineConfig | None = None) -> None:
        self._config = config or EngineConfig()
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        self._adapters: dict[str, TrainableAdapter] = {}
        self._batchers: dict[str, ContinuousBatcher] = {}
        self._sample_seconds: dict[str, float] = {}
        """How long the samples of each busy base model have run."""
        self._rejected_samples: list[FinishedSample] = []
        self._registry = ModelRegistry(sources, self._config, self._is_busy, self._drop_batcher)
        self._sampler_adapters = SamplerAdapterCache(self._config.sampler_bytes)

    def base_models(self) -> Sequence[BaseModel]:
        """What is served."""
        return self._registry.base_models()

    def replace_models(self, sources: Mapping[str, str]) -> None:
        """Serve these base models from now on; one that adapters or samples use stays loaded."""
        in_use = {adapter.spec.base_model for adapter in self._adapters.values()}
        self._registry.replace_sources(sources, in_use | set(filter(self._is_busy, self._batchers)))

    # --- adapters ---------------------------------------------------------------------------
    def create(self, adapter_id: str, spec: AdapterSpec) -> None:
        """Make a new adapter that changes no log-probability yet."""
        check_adapter_size(self, spec)
        self._adapters[adapter_id] = create_adapter(
            self._registry.get(spec.base_model).hosted_model, spec
        )

    def has_adapter(self, adapter_id: str) -> bool:
        """Whether the adapter is in memory."""
        return adapter_id in self._adapters

    def drop(self, adapter_id: str) -> None:
        """Forget an adapter's memory; one that is not there is no error."""
        self._adapters.pop(adapter_id, None)

    # --- memory of adapters -----------------------------------------------------------------
    def training_bytes(self, spec: AdapterSpec) -> int:
        """The most memory that training such an adapter takes."""
        check_spec(spec)
        return training_bytes(build_layout(self._registry.get(spec.base_model).hosted_model, spec))

    @property
    def max_adapter_bytes(self) -> int:
        """The memory budget of all adapters together."""
        return self._config.adapter_bytes or _device_memory_bytes(self._config) // 4

    # --- training ---------------------------------------------------------------------------
    def start_passes(self, passes: Sequence[Pass]) -> GeneratorPassRun:
        """Begin passes; those on one base model are computed together."""
        return GeneratorPassRun(self._run_passes(passes))

    def run_passes(self, passes: Sequence[Pass]) -> Sequence[PassOutcome]:
        """Run passes to their end."""
        return self.start_passes(passes).finish()

    def _run_passes(self, passes: Sequence[Pass]) -> PassSteps:
        outcomes: dict[int, PassOutcome] = {}
        by_model: dict[str, list[int]] = {}
        for place, each in enumerate(passes):
            adapter = self._adapters.get(each.adapter_id)
            if adapter is None:
                reason = _not_in_memory_message(each.adapter_id)
                outcomes[place] = EngineFailure(reason, RequestErrorCategory.Server)
            else:
                by_model.setdefault(adapter.spec.base_model, []).append(place)
        for base_model, places in by_model.items():
            on_model = yield from self._run_on_model(
                base_model, [passes[place] for place in places]
            )
            outcomes.update(zip(places, on_model, strict=True))
        return [outcomes[place] for place in range(len(passes))]

    def _run_on_model(self, base_model: str, passes: Sequence[Pass]) -> PassSteps:
        try:
            read = [self._parse_pass(each, self._registry.get(base_model)) for each in passes]
        except TinkexError as error:
            return [EngineFailure(error.message, error.category)] * len(passes)
        works = [one for one in read if isinstance(one, PassWork)]
        # Between two micro-batches the model may make room for another, and come back.
        trainer = Trainer(lambda: self._registry.get(base_model).hosted_model, self._config)
        ran = iter((yield from trainer.run(works)))
        return [next(ran) if isinstance(one, PassWork) else one for one in read]

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
        return PassWork(adapter, request_pass.request, examples, request_pass.is_forward_only)

    def optim_step(self, adapter_id: str, params: OptimParams) -> Mapping[str, float]:
        """Apply the gathered gradient, clear it, and report metrics."""
        state = self._get_adapter(adapter_id).state
        if not isinstance(params, AdamParams):
            raise InvalidInput(
                f"optimizer_params of type {params.type!r} are not read here; send adam_params"
            )
        gradient = state.gradient
        first, second = state.ensure_moments()
        try:
            metrics = adamw_step(
                state.weights,
                gradient,
                first,
                second,
                state.num_steps + 1,
                params,
                apply_nonfinite=self._config.is_nonfinite_applied,
            )
        except NonFiniteGradient as error:
            state.gradient = None
            raise StepRefused(f"{error.message}; the gradient was dropped") from error
        if gradient is not None:
            state.gradient = None
            state.num_steps += 1
        return metrics

    # --- what is kept on disk ----------------------------------------------------------------
    def save(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Write a PEFT adapter, and what an optimizer needs to go on, into an empty directory."""
        adapter = self._get_adapter(adapter_id)
        adapter_files.write_checkpoint(
            directory, adapter.spec, adapter.layout, adapter.state, with_optimizer=with_optimizer
        )

    def load(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Go on from saved weights, if they fit; the gathered gradient is dropped."""
        adapter = self._get_adapter(adapter_id)
        device = adapter.state.weights.device
        spec, layout = adapter.spec, adapter.layout
        try:
            state = AdapterState.from_weights(
                adapter_files.read_adapter_weights(directory, spec, layout)
            )
            if with_optimizer:
                memory = adapter_files.read_optimizer(directory, spec, layout)
                state.first, state.second, state.num_steps = memory
        except CheckpointError as error:
            raise InvalidInput(f"the checkpoint cannot be loaded: {error.message}") from error
        adapter.replace_state(state.to(device))

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        """Copy the whole state now, gradient included; the result writes it later."""
        adapter = self._get_adapter(adapter_id)
        return partial(
            write_snapshot,
            spec=adapter.spec,
            layout=adapter.layout,
            state=adapter.state.copy_to_cpu(),
        )

    def restore(self, adapter_id: str, spec: AdapterSpec, directory: Path) -> None:
        """Bring an adapter back as it was when its snapshot was taken."""
        host = self._registry.get(spec.base_model).hosted_model
        layout = build_layout(host, spec)
        state = read_snapshot(directory, spec, layout).to(host.device)
        self._adapters[adapter_id] = TrainableAdapter(spec, layout, state)

    # --- sampling ---------------------------------------------------------------------------
    def start_sample(self, job_id: str, source: SamplerSource, request: SampleRequest) -> None:
        """Take a sample request into the running batch; a bad one is reported by `step_samples`."""
        try:
            model = self._registry.get(source.base_model)
            adapter = self._sampler_adapters.get_or_load(source, model.hosted_model)
        except TinkexError as error:
            self._rejected_samples.append(
                FinishedSample(job_id, EngineFailure(error.message, error.category))
            )
            return
        self._get_batcher(model).add(job_id, adapter, request, tenant_id=source.tenant_id)

    def step_samples(self) -> Sequence[FinishedSample]:
        """Go a short way with the samples of one base model, and hand out those that are over.

        The base model whose samples had the least time goes first.
        """
        finished, self._rejected_samples = self._rejected_samples, []
        busy = [name for name, runner in self._batchers.items() if len(runner)]
        if finished or not busy:
            return finished
        known = [self._sample_seconds[name] for name in busy if name in self._sample_seconds]
        # One that was idle begins level with the one that had the least.
        self._sample_seconds = {
            name: self._sample_seconds.get(name, min(known, default=0.0)) for name in busy
        }
        name = min(busy, key=self._sample_seconds.__getitem__)
        started = time.monotonic()
        finished = self._batchers[name].step()
        self._sample_seconds[name] += time.monotonic() - started
        return finished

    def cancel_sample(self, job_id: str) -> None:
        """Free a sample's place at once; one that is over or unknown is no error."""
        for runner in self._batchers.values():
            runner.cancel(job_id)
        self._rejected_samples = [one for one in self._rejected_samples if one.job_id != job_id]

    @property
    def num_samples(self) -> int:
        """How many sample requests are running."""
        return len(self._rejected_samples) + sum(map(len, self._batchers.values()))

    @property
    def max_samples(self) -> int:
        """As many as there can be sequences: a request has at least one."""
        return self._config.max_sequences

    def close(self) -> None:
        """Give back what is held."""
        self._adapters.clear()
        self._batchers.clear()
        self._sampler_adapters.clear()
        self._registry.close()

    # --- inside -----------------------------------------------------------------------------
    def _get_adapter(self, adapter_id: str) -> TrainableAdapter:
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            raise LookupError(_not_in_memory_message(adapter_id))
        return adapter

    def _get_batcher(self, model: LoadedModel) -> ContinuousBatcher:
        runner = self._batchers.get(model.name)
        if runner is None:
            runner = ContinuousBatcher(
                model.hosted_model,
                decoder=model.tokenizer,
                eos_tokens=model.eos_tokens,
                max_context_tokens=model.max_context_tokens,
                config=self._config,
            )
            self._batchers[model.name] = runner
        return runner

    def _drop_batcher(self, base_model: str) -> None:
        self._batchers.pop(base_model, None)

    def _is_busy(self, base_model: str) -> bool:
        runner = self._batchers.get(base_model)
        return runner is not None and len(runner) > 0


def _device_memory_bytes(config: EngineConfig) -> int:
    device = compute_device(config)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory_bytes()


def _not_in_memory_message(adapter_id: str) -> str:
    return f"adapter {adapter_id!r} is not in memory"
