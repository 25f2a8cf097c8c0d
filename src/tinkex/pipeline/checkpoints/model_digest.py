"""Digests that identify a weights file or a model folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tinkex.data.jsonl import digest_file
from tinkex.errors import ConfigError

_CONFIG_FILE = "config.json"


def list_weight_files(folder: Path) -> list[Path]:
    """Return the weights and config.json of a folder, without tokenizer and model card.

    Returns an empty list if weights or config.json are missing.
    """
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    config = folder / _CONFIG_FILE
    return [*weights, config] if weights and config.is_file() else []


def digest_weights(path: Path) -> str:
    """Return the digest of a .pth file, or of a folder's weights and config."""
    if path.is_file():
        return digest_file(path)
    files = list_weight_files(path)
    if not files:
        raise ConfigError(
            f"{path} is not a model: {_CONFIG_FILE} or weights are missing",
            hint="Pass a Hugging Face folder or a .pth file.",
        )
    return combine_file_digests((file.name, digest_file(file)) for file in files)


def combine_file_digests(digests: Iterable[tuple[str, str]]) -> str:
    """Combine file names and digests into one digest."""
    text = "".join(f"{name} {digest}\n" for name, digest in digests)
    return hashlib.sha256(text.encode()).hexdigest()
