"""Copies the tokenizers of local models into the Hugging Face cache, under the models' names.

The official SDK loads a base model's tokenizer from the Hub by the model's name. With a copy in the
cache, `AutoTokenizer.from_pretrained(name)` finds it, even offline. A copy has a marker file;
entries without it came from the Hub and are never changed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from tinkex.errors import CheckpointError, InvalidInput
from tinkex.system.atomic import new_directory, remove_directory
from tinkex.tokenizer_files import digest_files, read_tokenizer_files

#: Marks a cache entry as a copy of ours.
MARKER = ".tinkex-tokenizer.json"
#: Names that the Hub allows: at most one slash, written `--` in the folder's name.
_NAME = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")


class TokenizerRegistration(StrEnum):
    """The result of a registration."""

    DONE = "registered"  #: the copy is in the cache
    FOREIGN = "foreign"  #: the cache has this name from the Hub; nothing changed
    NO_TOKENIZER = "no_tokenizer"  #: the folder has no tokenizer
    BAD_NAME = "bad_name"  #: the Hub does not allow this name
    UNWRITABLE = "unwritable"  #: the cache cannot be written


def hub_cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """The Hugging Face cache directory, from the same variables that huggingface_hub reads."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(name):
            return Path(environment[name]).expanduser()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{base}/huggingface"
    return Path(home).expanduser() / "hub"


def register_tokenizer(name: str, folder: Path, cache: Path | None = None) -> TokenizerRegistration:
    """Copy a model folder's tokenizer into the cache under the model's name."""
    if not _NAME.fullmatch(name):
        return TokenizerRegistration.BAD_NAME
    target = _cache_entry(name, cache)
    if target.exists() and not is_tinkex_copy(target):
        return TokenizerRegistration.FOREIGN
    try:
        files = read_tokenizer_files(folder)
        if not files:
            return TokenizerRegistration.NO_TOKENIZER
        digest = digest_files(files)
        if _read_digest(target) != digest:
            _write_copy(target, name, files, digest)
    except (OSError, CheckpointError, InvalidInput):
        return TokenizerRegistration.UNWRITABLE
    return TokenizerRegistration.DONE


def unregister_tokenizer(name: str, cache: Path | None = None) -> bool:
    """Remove a copy made by `register_tokenizer`; returns False if there is none."""
    if not _NAME.fullmatch(name):
        return False
    target = _cache_entry(name, cache)
    if not is_tinkex_copy(target):
        return False
    remove_directory(target)
    return True


def is_tinkex_copy(entry: Path) -> bool:
    """Whether a cache entry is a copy made by `register_tokenizer`."""
    return (entry / MARKER).is_file()


def _cache_entry(name: str, cache: Path | None) -> Path:
    return (cache or hub_cache_directory()) / f"models--{name.replace('/', '--')}"


def _read_digest(entry: Path) -> str | None:
    try:
        marker = json.loads((entry / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    return str(marker.get("digest")) if isinstance(marker, dict) else None


def _write_copy(target: Path, name: str, files: Mapping[str, bytes], digest: str) -> None:
    # Revisions on the Hub are 40 hexadecimal digits.
    revision = digest[:40]
    with new_directory(target) as scratch:
        snapshot = scratch / "snapshots" / revision
        snapshot.mkdir(parents=True)
        for file_name, content in files.items():
            (snapshot / file_name).write_bytes(content)
        (scratch / "refs").mkdir()
        (scratch / "refs" / "main").write_text(revision, "ascii")
        marker = {"made_by": "tinkex", "model": name, "digest": digest}
        (scratch / MARKER).write_text(json.dumps(marker), "utf-8")
