"""Models of the Qwen3 kind: from sizes with random weights, or from what a parent stage made."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields
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

from tinkex.engine.models.weight_files import describe_header_problem
from tinkex.errors import CheckpointError, ConfigError
from tinkex.pipeline.trainer_arguments import TrainerArguments
from tinkex.pipeline.weights import load_weights
from tinkex.units import format_count

#: Families whose layers `forward` knows.
MODEL_TYPES = ("qwen3", "qwen3_moe", "llama", "qwen2")
_EXPERTS_PER_TOKEN = 2
#: Positions that the finished model takes, however short its training sequences were.
_MIN_POSITIONS = 2048
_ROPE_THETA = 10_000.0
#: What torch and transformers raise about files that they cannot read.
_LOAD_ERRORS = (
    *(OSError, ValueError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError),
    SafetensorError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """How large a model is."""

    hidden_size: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 2
    intermediate_size: int = 0
    """0 chooses 8/3 of the hidden size, rounded up to 64."""
    max_seq_len: int = 512
    use_moe: bool = False
    num_experts: int = 4


def model_sizes(args: TrainerArguments) -> ModelSizes:
    """The sizes that a command line asks for."""
    told = {name: getattr(args, name) for name in (field.name for field in fields(ModelSizes))}
    return ModelSizes(**{name: value for name, value in told.items() if value is not None})


def make_config(sizes: ModelSizes, vocab_size: int, eos_id: int, pad_id: int) -> PreTrainedConfig:
    """The config of a new model."""
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
        # Those that work on a token are together as wide as the MLP would be.
        moe_intermediate_size=_round_up_to_64(width / num_active),
        norm_topk_prob=True,
    )


def make_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model with random weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = (Qwen3MoeForCausalLM if config.model_type == "qwen3_moe" else Qwen3ForCausalLM)(
            config
        )
    return _set_train_mode(made)


def load_model(path: Path, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """A model from its folder, or from a file of weights that fit the config given."""
    check_model_exists(path)
    if path.is_dir():
        return _load_folder(path)
    if config is None:
        raise ConfigError(f"{path} is a file of weights; a model folder is needed here")
    model = make_model(config, seed=0)
    try:
        load_weights(model, read_weights(path))
    except CheckpointError as error:
        raise ConfigError(
            f"{path}: {error.message}",
            hint="Give the sizes that it was trained with, or name its model folder.",
        ) from None
    return model


def check_model_exists(path: Path) -> None:
    """Refuse a place where nothing is."""
    if not path.exists():
        raise ConfigError(
            f"there is no model at {path}", hint="Name a model folder or a .pth file."
        )


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; nothing in it is run."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        raise ConfigError(
            f"{path} holds no weights that can be read: {_describe_error(error)}",
            hint="Name a .pth file that a trainer wrote, or a model folder.",
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise ConfigError(f"{path} holds no table of weights")
    return dict(found)


def check_sizes(config: PreTrainedConfig, args: TrainerArguments, parent: Path) -> None:
    """Refuse sizes that are asked for and that the parent does not have."""
    told = {
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": args.num_kv_heads,
        "intermediate_size": args.intermediate_size or None,
    }
    for name, wanted in told.items():
        if wanted is not None and wanted != getattr(config, name):
            raise ConfigError(
                f"{name} is {wanted}, but the model in {parent} has {getattr(config, name)}",
                hint="Leave the size out, or start from another model.",
            )


def is_moe(config: PreTrainedConfig) -> bool:
    """Whether layers have experts."""
    return bool(config.model_type == "qwen3_moe")


def _load_folder(path: Path) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if config.model_type not in MODEL_TYPES:
            raise ConfigError(
                f"{path} holds a {config.model_type!r} model; the trainers know "
                f"{', '.join(MODEL_TYPES)}"
            )
        made: Any = AutoModelForCausalLM.from_pretrained(
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
            f"{path} holds no model that can be read: "
            f"{_find_damaged_file(path) or _describe_error(error)}",
            hint="Name a model folder with config.json and model.safetensors.",
        ) from error
    model, report = made
    # transformers would go on with random numbers in their place.
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{path} lacks {format_count(len(missing), 'tensor')}, such as {missing[0]}"
        )
    for parameter in model.parameters():
        # What was read may be a view of the file itself, which training must not write to.
        parameter.data = parameter.data.clone()
    return _set_train_mode(model)


def _find_damaged_file(folder: Path) -> str | None:
    """The first file of weights with a damaged header, and the tensor that it is about."""
    for file in sorted(folder.glob("*.safetensors")):
        if (problem := describe_header_problem(file)) is not None:
            return f"{file.name}: {problem}"
    return None


def _set_train_mode(model: Any) -> PreTrainedModel:
    assert isinstance(model, PreTrainedModel)
    model.train()
    return model


def _round_up_to_64(width: float) -> int:
    return int(-(-width // 64) * 64)


def _describe_error(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
