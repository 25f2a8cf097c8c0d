"""An engine that samples with vLLM, and does not train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import msgspec

from tinkex.engine.checkpoints.metadata import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    read_metadata,
    read_struct,
)
from tinkex.engine.models.model_folder import ModelFolder
from tinkex.engine.protocol import (
    AdapterSpec,
    BaseModel,
    Declined,
    EngineFailure,
    FinishedSample,
    Pass,
    PassRun,
    SampleProgress,
    SamplerSource,
    WriteSnapshot,
)
from tinkex.engine.sampler_cache import CacheKey, SamplerCache
from tinkex.engine.sampling.request import ModelLimits, SampleSpec, parse_sample_request
from tinkex.engine.vllm.frames import (
    Answer,
    DeclinedFrame,
    DoneFrame,
    decode_done,
    encode_sample,
    find_unsupported,
)
from tinkex.engine.vllm.process import VllmProcess
from tinkex.errors import InvalidInput, TinkexError
from tinkex.logs import get_logger
from tinkex.types import SampleRequest, SampleResponse
from tinkex.types.optimizers import OptimParams

LOG = get_logger(__name__)
REFUSAL = "this worker samples with vLLM and does not train; start one with --engine local"
#: How long a step waits for results.
STEP_SECONDS = 0.02
#: Checkpoints whose adapter id is remembered; a forgotten one gets a new id.
MAX_ADAPTER_IDS = 4096
#: The id of the adapter without weights.
NO_ADAPTER_ID = 1
_GIBIBYTE = 1 << 30
#: Arguments of vLLM's engine that `vllm_options` can replace.
DEFAULT_OPTIONS: Mapping[str, object] = {
    "max_loras": 8,
    "max_cpu_loras": 64,
    "max_lora_rank": 64,
    "enable_prefix_caching": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """How vLLM is started."""

    python: str
    """The Python of vLLM's environment."""
    base_model: str
    """The name that clients use."""
    folder: ModelFolder
    tokenizer_id: str | None = None
    dtype: str = "float32"
    max_samples: int = 64
    """Maximum number of concurrent requests."""
    cache_bytes: int = _GIBIBYTE
    """Memory for the KV cache on a CPU; `gpu_memory_utilization` determines it on a GPU."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of vLLM's engine."""

    def engine_arguments(self) -> dict[str, object]:
        """The arguments of vLLM's engine."""
        return {
            **DEFAULT_OPTIONS,
            **self.options,
            "model": str(self.folder.path),
            "dtype": self.dtype,
            "max_num_seqs": self.max_samples,
            "enable_lora": True,
            "skip_tokenizer_init": not self.folder.has_tokenizer,
            # As ours: after the temperature.
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 256,
            # The sampling parameters of the model's folder are no defaults of ours.
            "generation_config": "vllm",
            "disable_log_stats": True,
        }

    def environment(self) -> dict[str, str]:
        """The environment variables of vLLM's process."""
        environment = {"VLLM_CPU_KVCACHE_SPACE": str(max(1, self.cache_bytes // _GIBIBYTE))}
        if self.options.get("enforce_eager"):
            # Else the first sample waits a minute for the compilation of a small function.
            environment["TORCHDYNAMO_DISABLE"] = "1"
        return environment

    @property
    def has_unembed(self) -> bool:
        """Whether vLLM applies adapters to the unembedding."""
        modules = self.options.get("lora_target_modules")
        return not isinstance(modules, Sequence) or "lm_head" in modules


class AdapterConfig(msgspec.Struct, frozen=True):
    """The fields of `adapter_config.json` that vLLM's limits concern."""

    r: int
    target_parameters: list[str] | None = None


def write_empty_adapter(folder: Path) -> Path:
    """Write an adapter of a module that does not exist, which vLLM applies like none."""
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": []}
    (folder / CONFIG_NAME).write_bytes(msgspec.json.encode(config))
    # vLLM does not look up modules of this name before it loads them.
    module = "base_model.model.none.base_layer"
    tensor = {"dtype": "F32", "shape": [1, 1]}
    header = msgspec.json.encode(
        {
            f"{module}.lora_A.weight": {**tensor, "data_offsets": [0, 4]},
            f"{module}.lora_B.weight": {**tensor, "data_offsets": [4, 8]},
        }
    )
    (folder / WEIGHTS_NAME).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return folder


class VllmEngine:
    """Samples from one base model and its adapters, in the process of vLLM."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._running: dict[str, SampleSpec] = {}
        self._finished: list[FinishedSample] = []
        LOG.info("starting vLLM with %s", config.folder.path)
        self._files = TemporaryDirectory(prefix="tinkex-vllm-")
        try:
            self._process = VllmProcess(config.python, config.environment())
        except BaseException:
            self._files.cleanup()
            raise
        try:
            no_adapter = write_empty_adapter(Path(self._files.name))
            arguments = {"engine": config.engine_arguments(), "no_adapter": str(no_adapter)}
            self._ready = self._process.load(arguments)
        except BaseException:
            self.close()
            raise
        self._limits = ModelLimits(
            vocab_size=self._ready.vocab_size,
            max_context_tokens=self._ready.max_context_tokens,
            eos_tokens=frozenset(self._ready.eos_tokens),
            has_tokenizer=config.folder.has_tokenizer,
        )
        # Ids are unique for the life of vLLM's process, which does not check that they are.
        self._adapter_ids: SamplerCache[int] = SamplerCache(MAX_ADAPTER_IDS)
        self._num_adapters = NO_ADAPTER_ID

    @property
    def pid(self) -> int:
        """The process id of vLLM."""
        return self._process.pid

    def base_models(self) -> Sequence[BaseModel]:
        """The only base model."""
        folder = self._config.folder
        return [
            BaseModel(
                name=self._config.base_model,
                max_context_tokens=self._ready.max_context_tokens,
                arch=folder.arch or folder.model_type,
                vocab_size=self._ready.vocab_size,
                tokenizer_id=self._config.tokenizer_id,
                tokenizer_folder=str(folder.path) if folder.has_tokenizer else None,
                is_trainable=False,
            )
        ]

    def check_alive(self) -> bool:
        """Raise EngineLost if vLLM has ended; returns False, because its models never change."""
        self._receive(0.0)
        return False

    # --- sampling --------------------------------------------------------------------------------
    def start_sample(self, job_id: str, source: SamplerSource, request: SampleRequest) -> None:
        """Send a sample request to vLLM; what it cannot do is declined by `step_samples`."""
        try:
            spec = parse_sample_request(request, self._limits)
            adapter = self._find_adapter(source)
            reason = find_unsupported(spec, has_unembed=self._config.has_unembed)
        except TinkexError as error:
            # The limits may be only those of vLLM, so our engine decides.
            reason = error.message
        if reason is not None:
            self._finished.append(FinishedSample(job_id, Declined(reason)))
            return
        self._running[job_id] = spec
        # A prompt that is found in the cache takes less time, which must not reveal it to others.
        salt = source.tenant_id or "-"
        self._process.send(encode_sample(job_id, spec, adapter=adapter, salt=salt))

    def step_samples(self) -> Sequence[FinishedSample]:
        """Wait for a short time and return the finished samples."""
        self._receive(0.0 if self._finished or not self._running else STEP_SECONDS)
        finished, self._finished = self._finished, []
        return finished

    def cancel_sample(self, job_id: str) -> int:
        """Cancel a sample request; returns 0, because vLLM sends no tokens before the end."""
        self._finished = [sample for sample in self._finished if sample.job_id != job_id]
        if self._running.pop(job_id, None) is not None:
            self._process.send({"type": "cancel", "id": job_id})
        return 0

    def watch_sample(self, job_id: str) -> None:
        """Do nothing: vLLM sends a sample when it is finished."""

    def unwatch_sample(self, job_id: str) -> None:
        """Do nothing: there is nothing to report."""

    def sample_progress(self) -> Sequence[SampleProgress]:
        """Return nothing: vLLM sends a sample when it is finished."""
        return ()

    @property
    def num_samples(self) -> int:
        """The number of running sample requests."""
        return len(self._running) + len(self._finished)

    @property
    def max_samples(self) -> int:
        """The maximum number of running sample requests."""
        return self._config.max_samples

    def close(self) -> None:
        """End vLLM."""
        self._running.clear()
        self._process.close()
        self._files.cleanup()

    def _receive(self, timeout_seconds: float) -> None:
        for answer in self._process.receive(timeout_seconds):
            finished = self._finish(answer)
            if finished is not None:
                self._finished.append(finished)

    def _finish(self, answer: Answer) -> FinishedSample | None:
        """Convert an answer; None for a cancelled sample."""
        assert isinstance(answer, DoneFrame | DeclinedFrame)
        spec = self._running.pop(answer.id, None)
        if spec is None:
            return None
        outcome: SampleResponse | EngineFailure | Declined | None
        if isinstance(answer, DeclinedFrame):
            LOG.warning("vLLM cannot run sample %s: %s", answer.id, answer.error)
            outcome = Declined(answer.error)
        else:
            outcome = decode_done(answer, spec) or Declined("vLLM has aborted it")
        return FinishedSample(answer.id, outcome)

    def _find_adapter(self, source: SamplerSource) -> tuple[int, str] | None:
        """Return the id and the directory of an adapter; raises InvalidInput if it is not for us.

        vLLM loads adapters by id, and never again the same id, so new files get a new id.
        """
        if source.base_model != self._config.base_model:
            raise InvalidInput(f"base model {source.base_model!r} is not {self._config.base_model}")
        directory = source.directory
        if directory is None:
            return None

        def assign(_: CacheKey) -> tuple[int, int]:
            self._check_adapter(directory, source.base_model)
            self._num_adapters += 1
            return self._num_adapters, 1

        return self._adapter_ids.get_or_load(directory, assign, source.key), str(directory)

    def _check_adapter(self, directory: Path, base_model: str) -> None:
        saved = read_metadata(directory)
        if saved.base_model != base_model:
            raise InvalidInput(f"the weights are of {saved.base_model!r}, not of {base_model!r}")
        is_unembed_trained = saved.train_unembed and (
            saved.target_modules is None or "lm_head" in saved.target_modules
        )
        if is_unembed_trained and not self._config.has_unembed:
            raise InvalidInput("the unembedding is trained, but not in lora_target_modules")
        config = read_struct(directory / CONFIG_NAME, AdapterConfig)
        if config.r > self._ready.max_lora_rank:
            raise InvalidInput(f"rank {config.r} is above max_lora_rank")
        if config.target_parameters:
            raise InvalidInput("the adapter has weights of experts")

    # --- training, which is left to others -------------------------------------------------------
    def create(self, adapter_id: str, spec: AdapterSpec) -> NoReturn:
        """Refuse."""
        raise InvalidInput(REFUSAL)

    def has_adapter(self, adapter_id: str) -> bool:
        """No adapter is in training."""
        return False

    def drop(self, adapter_id: str) -> None:
        """No adapter is in training."""

    def training_bytes(self, spec: AdapterSpec) -> NoReturn:
        """Refuse."""
        raise InvalidInput(REFUSAL)

    @property
    def max_adapter_bytes(self) -> int:
        """The memory for training: none."""
        return 0

    def start_passes(self, passes: Sequence[Pass]) -> PassRun:
        """Refuse."""
        raise InvalidInput(REFUSAL)

    def optim_step(self, adapter_id: str, params: OptimParams) -> NoReturn:
        """Refuse."""
        raise InvalidInput(REFUSAL)

    def save(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> NoReturn:
        """Refuse."""
        raise InvalidInput(REFUSAL)

    def load(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> NoReturn:
        """Refuse."""
        raise InvalidInput(REFUSAL)

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        """Refuse."""
        raise InvalidInput(REFUSAL)

    def restore(self, adapter_id: str, spec: AdapterSpec, directory: Path) -> NoReturn:
        """Refuse."""
        raise InvalidInput(REFUSAL)
