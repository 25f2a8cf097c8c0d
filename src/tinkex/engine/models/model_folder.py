"""Inspects a Hugging Face model folder without reading its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.models.weight_files import (
    UnusableModel,
    WeightFiles,
    read_json,
    read_weight_files,
)

#: Parts of the class names of causal language models.
_CAUSAL_LM_MARKS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "WithLMHead")
#: Names of the maximum context length in the configs of different families.
CONTEXT_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
)
#: Bytes per element of the dtypes that models compute with or are saved as.
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Properties of a model that are known before it is loaded."""

    path: Path
    arch: str
    """The transformers class that config.json names."""
    model_type: str
    max_context_tokens: int | None
    """Context length for prompt and generated tokens; None if config.json does not give it."""
    dtype: str
    """The dtype of the saved weights."""
    weights: WeightFiles
    has_tokenizer: bool

    def num_bytes(self, dtype: str) -> int:
        """The memory that the weights need when they are loaded as `dtype`."""
        size = DTYPE_BYTES[dtype]
        if self.weights.num_parameters is not None:
            return self.weights.num_parameters * size
        return self.weights.num_file_bytes * size // DTYPE_BYTES.get(self.dtype, 4)


def read_model_folder(path: Path) -> ModelFolder:
    """Inspect a model folder; raises UnusableModel if it cannot be a base model."""
    config = read_model_config(path)
    weights = read_weight_files(path)
    return ModelFolder(
        path=path,
        arch=next(iter(_class_names(config)), ""),
        model_type=str(config.get("model_type", "")),
        max_context_tokens=_read_max_context_tokens(config),
        dtype=_saved_dtype(config, weights),
        weights=weights,
        has_tokenizer=any((path / name).is_file() for name in _TOKENIZER_FILES),
    )


def read_model_config(path: Path) -> dict[str, object]:
    """Read a folder's config.json; raises UnusableModel if it is not that of a base model."""
    _check_path(path)
    config = read_json(path / "config.json")
    _check_architecture(path, config)
    return config


def _check_path(path: Path) -> None:
    if path.is_file() and path.suffix.lower() == ".gguf":
        raise UnusableModel(
            f"{path} is a GGUF file, which must be converted before it is served",
            hint=f"Run `tinkex model add NAME {path}`.",
        )
    if path.is_file():
        raise UnusableModel(f"{path} is a file; give the folder that has the model's config.json")
    if not path.is_dir():
        raise UnusableModel(f"folder {path} does not exist")
    if (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise UnusableModel(f"{path} is an adapter, not a base model; give the base model's folder")
    gguf = min(path.glob("*.gguf"), default=None)
    raise UnusableModel(
        f"{path} has no config.json, so it is not a Hugging Face model folder",
        hint=f"Give the file itself, for example {gguf}." if gguf else None,
    )


def _check_architecture(path: Path, config: Mapping[str, object]) -> None:
    class_names = _class_names(config)
    is_causal = any(mark in name for name in class_names for mark in _CAUSAL_LM_MARKS)
    if config.get("is_encoder_decoder") or (class_names and not is_causal):
        kind = class_names[0] if class_names else "an encoder-decoder"
        raise UnusableModel(f"{path} holds {kind}, which is not a causal language model")
    if not config.get("model_type"):
        raise UnusableModel(f"{path / 'config.json'} has no model_type")
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "?") if isinstance(quantized, Mapping) else "?"
        raise UnusableModel(
            f"{path} is quantized ({method}), which cannot be trained",
            hint="Use the original weights in float32, bfloat16 or float16.",
        )


def _class_names(config: Mapping[str, object]) -> list[str]:
    names = config.get("architectures") or []
    return [str(name) for name in (names if isinstance(names, list) else [names])]


def _read_max_context_tokens(config: Mapping[str, object]) -> int | None:
    text = config.get("text_config")
    for part in (text if isinstance(text, Mapping) else {}, config):
        for name in CONTEXT_LENGTH_KEYS:
            length = part.get(name)
            if isinstance(length, int) and length > 0:
                return int(length)
    return None


def _saved_dtype(config: Mapping[str, object], weights: WeightFiles) -> str:
    if weights.dtypes:
        return _DTYPE_NAMES.get(weights.dtypes[0], weights.dtypes[0].lower())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
