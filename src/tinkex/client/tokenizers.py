"""Tokenizers from the server: fetched once, kept on disk by their digest, then loaded from there.

A server of another make has no such endpoint; its tokenizers come from the hub, by their names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tinkex.client.holder import Holder
from tinkex.errors import APIStatusError, CheckpointError, InvalidInput
from tinkex.home import Home
from tinkex.logs import get_logger
from tinkex.settings import read_environment
from tinkex.system.atomic import new_directory, remove_directory
from tinkex.text import Tokenizer, load_tokenizer, resolve_tokenizer_id
from tinkex.tokenizer_files import check_tokenizer_files
from tinkex.wire.endpoints import GET_TOKENIZER

#: How many tokenizers stay on disk; those unused for longest are removed.
MAX_FOLDERS: Final = 16
#: What servers answer that do not have the endpoint.
_UNSUPPORTED_STATUSES = frozenset({404, 405, 501})
logger = get_logger(__name__)


def load_model_tokenizer(holder: Holder, base_model: str, tokenizer_id: str | None) -> Tokenizer:
    """The tokenizer of a base model: a loader's, else the server's own, else the hub's."""
    wanted = resolve_tokenizer_id(base_model, tokenizer_id)
    loader = holder.config.tokenizer_loader
    if loader is not None:
        return load_tokenizer(wanted, loader=loader)
    folder = holder.run(fetch_tokenizer(holder, base_model, Home(read_environment().home)))
    return load_tokenizer(wanted if folder is None else str(folder))


async def fetch_tokenizer(holder: Holder, base_model: str, home: Home) -> Path | None:
    """The folder with a base model's tokenizer as the server has it; None if it has none."""
    await holder.ready()
    call = holder.transport.call
    try:
        about = await call(GET_TOKENIZER, query={"base_model": base_model})
        folder = home.tokenizers / _checked_digest(about.digest)
        if folder.is_dir():
            folder.touch()
            return folder
        query = {"base_model": base_model, "digest": about.digest}
        found = await call(GET_TOKENIZER, query=query)
    except APIStatusError as error:
        if error.status_code in _UNSUPPORTED_STATUSES:
            return None
        raise
    check_tokenizer_files(found.files, about.digest)
    try:
        _store_files(folder, found.files)
    except (OSError, CheckpointError) as error:
        logger.warning("the tokenizer of %s cannot be kept in %s: %s", base_model, folder, error)
        return None
    return folder


def _checked_digest(digest: str) -> str:
    """A digest that is safe as the name of a folder."""
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InvalidInput(f"the server's digest of a tokenizer is {digest!r:.80}")
    return digest


def _store_files(folder: Path, files: dict[str, bytes]) -> None:
    with new_directory(folder) as scratch:
        for name, content in files.items():
            (scratch / name).write_bytes(content)
    kept = [each for each in folder.parent.iterdir() if each.is_dir() and each != folder]
    kept.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    for old in kept[MAX_FOLDERS - 1 :]:
        remove_directory(old)
