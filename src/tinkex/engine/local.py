"""The engine that trains and samples on PyTorch, in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from tinkex.engine.adapters import Adapter, check_spec, layout_of, new_adapter, training_bytes
from tinkex.engine.checkpoints import files
from tinkex.engine.checkpoints.snapshots import read_snapshot, write_snapshot
from tinkex.engine.config import EngineConfig
from tinkex.engine.examples import read_examples
from tinkex.engine.machine_memory import machine_bytes
from tinkex.engine.models.loading import Loaded, compute_device
from tinkex.engine.models.shelf import Shelf
from tinkex.engine.pass_run import GeneratorRun, PassOutcome, PassSteps
from tinkex.engine.protocol import (
    AdapterSpec,
    BaseModel,
    Failure,
    Finished,
    Pass,
    SamplerSource,
    StepRefused,
    WriteSnapshot,
    refuse_too_large,
)
from tinkex.engine.sampler_shelf import SamplerShelf
from tinkex.engine.sampling.runner import SampleRunner
from tinkex.engine.state import AdapterState
from tinkex.engine.trainer import Trainer, Work
from tinkex.errors import CheckpointError, InvalidInput, RequestErrorCategory, TinkexError
from tinkex.nn.optim import NonFiniteGradient, adamw_step
from tinkex.types import AdamParams, SampleRequest
from tinkex.types.optimizers import OptimParams


class LocalEngine:
    """Serves the base models of some folders, and trains adapters on them.

    `sources` says where each model is by its name.
    """

    def __init__(self, sources: Mapping[str, str], config: EngineConfig | None = None) -> None:
        self._config = config or EngineConfig()
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        self._adapters: dict[str, Adapter] = {}
        self._runners: dict[str, SampleRunner] = {}
        self._seconds: dict[str, float] = {}
        """How long the samples of each busy base model have run."""
        self._refused: list[Finished] = []
        self._models = Shelf(sources, self._config, self._is_busy, self._forget_runner)
        self._samplers = SamplerShelf(self._config.sampler_bytes)

    def base_models(self) -> Sequence[BaseModel]:
        """What is served."""
        return self._models.describe()

    def replace_models(self, sources: Mapping[str, str]) -> None:
        """Serve these base models from now on; one that adapters or samples use stays loaded."""
        in_use = {adapter.spec.base_model for adapter in self._adapters.values()}
        self._models.replace(sources, in_use | set(filter(self._is_busy, self._runners)))

    # --- adapters ---------------------------------------------------------------------------
    def create(self, adapter_id: str, spec: AdapterSpec) -> None:
        """Make a new adapter that changes no log-probability yet."""
        refuse_too_large(self, spec)
        self._adapters[adapter_id] = new_adapter(self._models.get(spec.base_model).host, spec)

    def has(self, adapter_id: str) -> bool:
        """Whether the adapter is in memory."""
        return adapter_id in self._adapters

    def drop(self, adapter_id: str) -> None:
        """Forget an adapter's memory; one that is not there is no error."""
        self._adapters.pop(adapter_id, None)

    # --- memory of adapters -----------------------------------------------------------------
    def training_bytes(self, spec: AdapterSpec) -> int:
        """The most memory that training such an adapter takes."""
        check_spec(spec)
        return training_bytes(layout_of(self._models.get(spec.base_model).host, spec))

    @property
    def max_adapter_bytes(self) -> int:
        """The memory budget of all adapters together."""
        return self._config.adapter_bytes or _device_bytes(self._config) // 4

    # --- training ---------------------------------------------------------------------------
    def start_passes(self, passes: Sequence[Pass]) -> GeneratorRun:
        """Begin passes; those on one base model are computed together."""
        return GeneratorRun(self._run_passes(passes))

    def run_passes(self, passes: Sequence[Pass]) -> Sequence[PassOutcome]:
        """Run passes to their end."""
        return self.start_passes(passes).finish()

    def _run_passes(self, passes: Sequence[Pass]) -> PassSteps:
        outcomes: dict[int, PassOutcome] = {}
        by_model: dict[str, list[int]] = {}
        for place, each in enumerate(passes):
            adapter = self._adapters.get(each.adapter_id)
            if adapter is None:
                reason = _absent(each.adapter_id)
                outcomes[place] = Failure(reason, RequestErrorCategory.Server)
            else:
                by_model.setdefault(adapter.spec.base_model, []).append(place)
        for base_model, places in by_model.items():
            on_model = yield from self._run_on(base_model, [passes[place] for place in places])
            outcomes.update(zip(places, on_model, strict=True))
        return [outcomes[place] for place in range(len(passes))]

    def _run_on(self, base_model: str, passes: Sequence[Pass]) -> PassSteps:
        try:
            read = [self._read(each, self._models.get(base_model)) for each in passes]
        except TinkexError as error:
            return [Failure(error.message, error.category)] * len(passes)
        works = [one for one in read if isinstance(one, Work)]
        # Between two micro-batches the model may make room for another, and come back.
        trainer = Trainer(lambda: self._models.get(base_model).host, self._config)
        ran = iter((yield from trainer.run(works)))
        return [next(ran) if isinstance(one, Work) else one for one in read]

    def _read(self, each: Pass, model: Loaded) -> Work | Failure:
        try:
            examples = read_examples(
                each.work,
                vocab_size=model.host.vocab_size,
                max_context_tokens=model.max_context_tokens,
            )
        except InvalidInput as error:
            return Failure(error.message, error.category)
        adapter = self._adapters[each.adapter_id]
        return Work(adapter, each.work, examples, each.is_forward_only)

    def optim_step(self, adapter_id: str, params: OptimParams) -> Mapping[str, float]:
        """Apply the gathered gradient, clear it, and report metrics."""
        state = self._adapter(adapter_id).state
        if not isinstance(params, AdamParams):
            raise InvalidInput(
                f"optimizer_params of type {params.type!r} are not read here; send adam_params"
            )
        gradient = state.gradient
        first, second = state.moments()
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
        adapter = self._adapter(adapter_id)
        files.write_checkpoint(
            directory, adapter.spec, adapter.layout, adapter.state, with_optimizer=with_optimizer
        )

    def load(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Go on from saved weights, if they fit; the gathered gradient is dropped."""
        adapter = self._adapter(adapter_id)
        device = adapter.state.weights.device
        spec, layout = adapter.spec, adapter.layout
        try:
            state = AdapterState.fresh(files.read_weights(directory, spec, layout))
            if with_optimizer:
                memory = files.read_optimizer(directory, spec, layout)
                state.first, state.second, state.num_steps = memory
        except CheckpointError as error:
            raise InvalidInput(f"the checkpoint cannot be loaded: {error.message}") from error
        adapter.replace_state(state.moved(device))

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        """Copy the whole state now, gradient included; the result writes it later."""
        adapter = self._adapter(adapter_id)
        return partial(
            write_snapshot, spec=adapter.spec, layout=adapter.layout, state=adapter.state.copied()
        )

    def restore(self, adapter_id: str, spec: AdapterSpec, directory: Path) -> None:
        """Bring an adapter back as it was when its snapshot was taken."""
        host = self._models.get(spec.base_model).host
        layout = layout_of(host, spec)
        state = read_snapshot(directory, spec, layout).moved(host.device)
        self._adapters[adapter_id] = Adapter(spec, layout, state)

    # --- sampling ---------------------------------------------------------------------------
    def start_sample(self, ticket: str, source: SamplerSource, request: SampleRequest) -> None:
        """Take a sample request into the running batch; a bad one is reported by `step_samples`."""
        try:
            model = self._models.get(source.base_model)
            adapter = self._samplers.find(source, model.host)
        except TinkexError as error:
            self._refused.append(Finished(ticket, Failure(error.message, error.category)))
            return
        self._runner(model).add(ticket, adapter, request, scope=source.scope)

    def step_samples(self) -> Sequence[Finished]:
        """Go a short way with the samples of one base model, and hand out those that are over.

        The base model whose samples had the least time goes first.
        """
        finished, self._refused = self._refused, []
        busy = [name for name, runner in self._runners.items() if len(runner)]
        if finished or not busy:
            return finished
        known = [self._seconds[name] for name in busy if name in self._seconds]
        # One that was idle begins level with the one that had the least.
        self._seconds = {name: self._seconds.get(name, min(known, default=0.0)) for name in busy}
        name = min(busy, key=self._seconds.__getitem__)
        started = time.monotonic()
        finished = self._runners[name].step()
        self._seconds[name] += time.monotonic() - started
        return finished

    def cancel_sample(self, ticket: str) -> None:
        """Free a sample's place at once; one that is over or unknown is no error."""
        for runner in self._runners.values():
            runner.cancel(ticket)
        self._refused = [one for one in self._refused if one.ticket != ticket]

    @property
    def num_samples(self) -> int:
        """How many sample requests are running."""
        return len(self._refused) + sum(map(len, self._runners.values()))

    @property
    def max_samples(self) -> int:
        """As many as there can be sequences: a request has at least one."""
        return self._config.max_sequences

    def close(self) -> None:
        """Give back what is held."""
        self._adapters.clear()
        self._runners.clear()
        self._samplers.clear()
        self._models.close()

    # --- inside -----------------------------------------------------------------------------
    def _adapter(self, adapter_id: str) -> Adapter:
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            raise LookupError(_absent(adapter_id))
        return adapter

    def _runner(self, model: Loaded) -> SampleRunner:
        runner = self._runners.get(model.name)
        if runner is None:
            runner = SampleRunner(
                model.host,
                texts=model.texts,
                eos_tokens=model.eos_tokens,
                max_context_tokens=model.max_context_tokens,
                config=self._config,
            )
            self._runners[model.name] = runner
        return runner

    def _forget_runner(self, base_model: str) -> None:
        self._runners.pop(base_model, None)

    def _is_busy(self, base_model: str) -> bool:
        runner = self._runners.get(base_model)
        return runner is not None and len(runner) > 0


def _device_bytes(config: EngineConfig) -> int:
    device = compute_device(config)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_bytes()


def _absent(adapter_id: str) -> str:
    return f"adapter {adapter_id!r} is not in memory"
