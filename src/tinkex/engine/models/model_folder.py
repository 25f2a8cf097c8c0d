"""A model folder of Hugging Face's layout as its small files tell; no weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.engine.models.weight_files import (
    UnusableModel,
    WeightFiles,
    read_json,
    read_weight_files,
)

#: How architectures are called that predict the next token.
_CAUSAL_LM_MARKS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "WithLMHead")
#: What the longest context is called, in different families.
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
#: Bytes per number of what a model can compute with, or be saved as.
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What is known about a model before it is loaded."""

    path: Path
    arch: str
    """The class of transformers that runs it, as config.json names it."""
    model_type: str
    max_context_tokens: int | None
    """The most tokens it can read and write together; None if config.json leaves it out."""
    dtype: str
    """What the weights are saved as."""
    weights: WeightFiles
    has_tokenizer: bool

    def num_bytes(self, dtype: str) -> int:
        """The memory that the weights take when they are loaded as `dtype`."""
        size = DTYPE_BYTES[dtype]
        if self.weights.num_parameters is not None:
            return self.weights.num_parameters * size
        return self.weights.num_file_bytes * size // DTYPE_BYTES.get(self.dtype, 4)


def read_model_folder(path: Path) -> ModelFolder:
    """Look a model folder over; raises with a sentence if it cannot be a base model."""
    config = read_model_config(path)
    weights = read_weight_files(path)
    return ModelFolder(
        path=path,
        arch=str((config.get("architectures") or [""])[0]),
        model_type=str(config.get("model_type", "")),
        max_context_tokens=_read_max_context_tokens(config),
        dtype=_saved_dtype(config, weights),
        weights=weights,
        has_tokenizer=any((path / name).is_file() for name in _TOKENIZER_FILES),
    )


def read_model_config(path: Path) -> dict[str, Any]:
    """A folder's config.json, if it is that of a base model."""
    _check_path(path)
    config = read_json(path / "config.json")
    _check_architecture(path, config)
    return config


def _check_path(path: Path) -> None:
    if path.is_file() and path.suffix.lower() == ".gguf":
        raise UnusableModel(
            f"{path} is a GGUF file, which is converted before it is served",
            hint=f"Run `tinkex model add NAME {path}`.",
        )
    if path.is_file():
        raise UnusableModel(f"{path} is a file; name the folder that has the model's config.json")
    if not path.is_dir():
        raise UnusableModel(f"there is no folder {path}")
    if (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise UnusableModel(f"{path} is an adapter, not a base model; name the folder of its base")
    found = next(iter(sorted(path.glob("*.gguf"))), None)
    raise UnusableModel(
        f"{path} has no config.json, so it is no model folder of Hugging Face",
        hint=f"Name the file itself, such as {found}." if found else None,
    )


def _check_architecture(path: Path, config: Mapping[str, Any]) -> None:
    named = [str(name) for name in config.get("architectures") or ()]
    is_causal = any(mark in name for name in named for mark in _CAUSAL_LM_MARKS)
    if config.get("is_encoder_decoder") or (named and not is_causal):
        what = named[0] if named else "an encoder with a decoder"
        raise UnusableModel(f"{path} holds {what}, which is no causal language model")
    if not config.get("model_type"):
        raise UnusableModel(f"{path / 'config.json'} has no model_type")
    if quantized := config.get("quantization_config"):
        is_told = isinstance(quantized, Mapping)
        method = quantized.get("quant_method", "?") if is_told else "?"
        raise UnusableModel(
            f"{path} is quantized ({method}), which cannot be trained on here",
            hint="Use the original weights in float32, bfloat16 or float16.",
        )


def _read_max_context_tokens(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    for part in (text if isinstance(text, Mapping) else {}, config):
        for name in CONTEXT_LENGTH_KEYS:
            if isinstance(part.get(name), int) and part[name] > 0:
                return int(part[name])
    return None


def _saved_dtype(config: Mapping[str, Any], weights: WeightFiles) -> str:
    if weights.dtypes:
        return _DTYPE_NAMES.get(weights.dtypes[0], weights.dtypes[0].lower())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
