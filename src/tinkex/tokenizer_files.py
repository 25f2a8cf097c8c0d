"""The files of a tokenizer: which there are, how large they may be, and the digest of all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tinkex.errors import InvalidInput

#: What a tokenizer is loaded from. Weights and code are never among them.
TOKENIZER_FILE_NAMES: Final = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "special_tokens_map.json",
        "spiece.model",
        "tiktoken.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
#: Of a model's config only its type is kept: some tokenizers are found by it.
CONFIG_FILE_NAME: Final = "config.json"
#: The most bytes of all files together; the largest that are in use have about 35 MB.
MAX_TOKENIZER_BYTES: Final = 64 * 1024 * 1024


def find_tokenizer_files(folder: Path) -> dict[str, Path]:
    """The files of a model folder that belong to its tokenizer, by name."""
    found = {
        name: folder / name for name in sorted(TOKENIZER_FILE_NAMES) if (folder / name).is_file()
    }
    num_bytes = sum(path.stat().st_size for path in found.values())
    if num_bytes > MAX_TOKENIZER_BYTES:
        raise InvalidInput(
            f"the tokenizer has {num_bytes:,} bytes; at most {MAX_TOKENIZER_BYTES:,} are sent"
        )
    return found


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The content of a tokenizer's files; empty if the folder has no tokenizer."""
    files = {name: path.read_bytes() for name, path in find_tokenizer_files(folder).items()}
    kind = _model_type(folder / CONFIG_FILE_NAME) if files else None
    if kind is not None:
        files[CONFIG_FILE_NAME] = json.dumps({"model_type": kind}).encode()
    return files


def digest_files(files: Mapping[str, bytes]) -> str:
    """A digest of names and contents."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name} {hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return total.hexdigest()


def check_tokenizer_files(files: Mapping[str, bytes], digest: str) -> None:
    """Refuse files that are not those of a tokenizer, too large, or not what was announced."""
    unknown = sorted(files.keys() - TOKENIZER_FILE_NAMES - {CONFIG_FILE_NAME})
    if unknown:
        raise InvalidInput(f"{unknown[0]!r:.80} is not a file of a tokenizer")
    num_bytes = sum(map(len, files.values()))
    if num_bytes > MAX_TOKENIZER_BYTES:
        raise InvalidInput(
            f"the tokenizer has {num_bytes:,} bytes; at most {MAX_TOKENIZER_BYTES:,} are read"
        )
    if not files or digest_files(files) != digest:
        raise InvalidInput("the tokenizer's files do not have the digest that was announced")


def _model_type(config: Path) -> str | None:
    try:
        found = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return None
    kind = found.get("model_type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None
