"""The files of a tokenizer: names, size limit and digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tinkex.errors import InvalidInput
from tinkex.system.atomic import new_directory, remove_directory

#: Files that a tokenizer is loaded from; never weights or code.
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
#: Only the model type of the config is included, because some tokenizers need it.
CONFIG_FILE_NAME: Final = "config.json"
#: Maximum total size; the largest tokenizers in use have about 35 MB.
MAX_TOKENIZER_BYTES: Final = 64 * 1024 * 1024
#: Maximum number of tokenizers in a cache on disk.
MAX_CACHED_TOKENIZERS: Final = 16


def find_tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the tokenizer files of a model folder, by name."""
    files = {
        name: folder / name for name in sorted(TOKENIZER_FILE_NAMES) if (folder / name).is_file()
    }
    num_bytes = sum(path.stat().st_size for path in files.values())
    if num_bytes > MAX_TOKENIZER_BYTES:
        raise InvalidInput(
            f"the tokenizer has {num_bytes:,} bytes; at most {MAX_TOKENIZER_BYTES:,} are sent"
        )
    return files


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Read the tokenizer files; empty if the folder has no tokenizer."""
    files = {name: path.read_bytes() for name, path in find_tokenizer_files(folder).items()}
    kind = _model_type(folder / CONFIG_FILE_NAME) if files else None
    if kind is not None:
        files[CONFIG_FILE_NAME] = json.dumps({"model_type": kind}).encode()
    return files


def digest_files(files: Mapping[str, bytes]) -> str:
    """Return a digest of the names and contents."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name} {hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return total.hexdigest()


def check_tokenizer_files(files: Mapping[str, bytes], digest: str) -> None:
    """Refuse unknown file names, too many bytes, or a wrong digest."""
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


def store_tokenizer_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a tokenizer to a cache, whose least recently used folders are removed."""
    with new_directory(folder) as scratch:
        for name, content in files.items():
            (scratch / name).write_bytes(content)
    others = [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for old in others[MAX_CACHED_TOKENIZERS - 1 :]:
        remove_directory(old)


def _model_type(config: Path) -> str | None:
    try:
        content = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return None
    kind = content.get("model_type") if isinstance(content, dict) else None
    return kind if isinstance(kind, str) else None
