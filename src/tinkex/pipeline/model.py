"""Create Qwen3 models or load the model of a parent stage; choose device and dtype."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tinkex.display import format_count
from tinkex.engine.models.weight_files import describe_header_problem
from tinkex.errors import CheckpointError, ConfigError
from tinkex.logs import get_logger
from tinkex.pipeline.settings_sources import resolve_sizes
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.pipeline.weights import load_weights

LOG = get_logger(__name__)
#: Model families that `forward` supports.
MODEL_TYPES = ("qwen3", "qwen3_moe", "llama", "qwen2")
_EXPERTS_PER_TOKEN = 2
#: Minimum max_position_embeddings of a new model, even with shorter training sequences.
_MIN_POSITIONS = 2048
_ROPE_THETA = 10_000.0
#: Exceptions of torch and transformers for unreadable files.
_LOAD_ERRORS = (
    *(OSError, ValueError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError),
    SafetensorError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Dimensions of a model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int = 0
    """0 means 8/3 of the hidden size, rounded up to a multiple of 64."""
    max_seq_len: int = 512
    use_moe: bool = False
    num_experts: int = 4


def model_sizes(settings: TrainSettings) -> ModelSizes:
    """Return the sizes of a new model."""
    return ModelSizes(
        **resolve_sizes(settings),
        intermediate_size=settings.intermediate_size,
        max_seq_len=settings.max_seq_len,
        use_moe=settings.use_moe,
        num_experts=settings.num_experts,
    )


def make_config(sizes: ModelSizes, vocab_size: int, eos_id: int, pad_id: int) -> PreTrainedConfig:
    """Build the config of a new model."""
    width = sizes.intermediate_size or _round_up_to_64(sizes.hidden_size * 8 / 3)
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.hidden_size // sizes.num_heads,
        "max_position_embeddings": max(sizes.max_seq_len, _MIN_POSITIONS),
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
        "tie_word_embeddings": True,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
    }
    if not sizes.use_moe:
        return Qwen3Config(**common)
    num_active = min(_EXPERTS_PER_TOKEN, sizes.num_experts)
    return Qwen3MoeConfig(
        **common,
        num_experts=sizes.num_experts,
        num_experts_per_tok=num_active,
        # The active experts are together as wide as the dense MLP.
        moe_intermediate_size=_round_up_to_64(width / num_active),
        norm_topk_prob=True,
    )


def make_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Create a model with random weights that depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class = Qwen3MoeForCausalLM if is_moe(config) else Qwen3ForCausalLM
        return _set_train_mode(model_class(config))


def load_model(path: Path, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Load a model from its folder, or from a weights file that fits the given config."""
    check_model_exists(path)
    if path.is_dir():
        return _load_folder(path)
    if config is None:
        raise ConfigError(f"{path} is a weights file; expected a model folder")
    model = make_model(config, seed=0)
    try:
        load_weights(model, read_weights(path))
    except CheckpointError as error:
        raise ConfigError(
            f"{path}: {error.message}",
            hint="Pass the sizes it was trained with, or its model folder.",
        ) from None
    return model


def check_model_exists(path: Path) -> None:
    """Raise ConfigError if the path does not exist."""
    if not path.exists():
        raise ConfigError(f"no model at {path}", hint="Pass a model folder or a .pth file.")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a weights file; no pickled code is run."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        raise ConfigError(
            f"cannot read weights from {path}: {_describe_error(error)}",
            hint="Pass a .pth file written by a trainer, or a model folder.",
        ) from error
    if not isinstance(weights, Mapping) or not all(isinstance(x, Tensor) for x in weights.values()):
        raise ConfigError(f"{path} does not contain a state dict")
    return dict(weights)


def check_sizes(config: PreTrainedConfig, settings: TrainSettings, parent: Path) -> None:
    """Raise ConfigError if a requested size differs from the parent's."""
    requested = {
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "intermediate_size": settings.intermediate_size or None,
    }
    for name, wanted in requested.items():
        if wanted is not None and wanted != getattr(config, name):
            raise ConfigError(
                f"{name} is {wanted}, but the model in {parent} has {getattr(config, name)}",
                hint="Omit the size, or start from another model.",
            )


def is_moe(config: PreTrainedConfig) -> bool:
    """Return True if the model has mixture-of-experts layers."""
    return bool(config.model_type == "qwen3_moe")


def _load_folder(path: Path) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if config.model_type not in MODEL_TYPES:
            raise ConfigError(
                f"{path} has the unsupported model type {config.model_type!r}; "
                f"supported are {', '.join(MODEL_TYPES)}"
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            weights_only=True,
            output_loading_info=True,
        )
    except ConfigError:
        raise
    except _LOAD_ERRORS as error:
        raise ConfigError(
            f"cannot load a model from {path}: "
            f"{_find_damaged_file(path) or _describe_error(error)}",
            hint="Pass a model folder with config.json and model.safetensors.",
        ) from error
    model, report = loaded
    # transformers would initialize them randomly.
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{path} lacks {format_count(len(missing), 'tensor')}, such as {missing[0]}"
        )
    for parameter in model.parameters():
        # The tensors may be memory-mapped views of the file, which training must not change.
        parameter.data = parameter.data.clone()
    return _set_train_mode(model)


def _find_damaged_file(folder: Path) -> str | None:
    """Return the first weights file with a damaged header, and what is wrong with it."""
    for file in sorted(folder.glob("*.safetensors")):
        if (problem := describe_header_problem(file)) is not None:
            return f"{file.name}: {problem}"
    return None


def _set_train_mode(model: object) -> PreTrainedModel:
    assert isinstance(model, PreTrainedModel)
    model.train()
    return model


def _round_up_to_64(width: float) -> int:
    return int(-(-width // 64) * 64)


def _describe_error(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


# --- device and dtype ---------------------------------------------------------------------------


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device; each rank uses a different GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device {name!r} is not available: {str(error).partition(chr(10))[0]}",
            hint="Use --device auto or cpu.",
        ) from error
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype; bfloat16 only if the hardware supports it."""
    is_supported = has_bfloat16(device)
    if name == "bfloat16" and not is_supported:
        LOG.warning("bfloat16 is slow on this %s, so float32 is used", device.type)
    is_wanted = name == "bfloat16" or (name == "auto" and device.type == "cuda")
    return torch.bfloat16 if is_wanted and is_supported else torch.float32


def has_bfloat16(device: torch.device) -> bool:
    """Return True if the hardware supports bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return False
