"""By what a file of weights, or a model's folder, is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tinkex.data.jsonl import digest_file
from tinkex.errors import ConfigError

_CONFIG_FILE = "config.json"


def list_weight_files(folder: Path) -> list[Path]:
    """The files that make a folder the model it is; none if weights or configuration are missing.

    Its card and its tokenizer are not among them.
    """
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    config = folder / _CONFIG_FILE
    return [*weights, config] if weights and config.is_file() else []


def digest_weights(path: Path) -> str:
    """The digest of a .pth file, or of a folder's weights and configuration."""
    if path.is_file():
        return digest_file(path)
    files = list_weight_files(path)
    if not files:
        raise ConfigError(
            f"{path} is no model: it has no {_CONFIG_FILE} beside weights",
            hint="Name a Hugging Face folder or a .pth file.",
        )
    return combine_file_digests((file.name, digest_file(file)) for file in files)


def combine_file_digests(digests: Iterable[tuple[str, str]]) -> str:
    """One digest for files with their names and digests."""
    text = "".join(f"{name} {digest}\n" for name, digest in digests)
    return hashlib.sha256(text.encode()).hexdigest()
