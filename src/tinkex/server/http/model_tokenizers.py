"""Loads the tokenizers of served base models in an API process."""

from __future__ import annotations

from pathlib import Path

from tinkex.checkpoint.storage import FileStorage
from tinkex.engine.protocol import BaseModel
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.home import Home
from tinkex.jobs.tokenizer_blobs import read_published_tokenizer
from tinkex.text import Tokenizer, load_tokenizer
from tinkex.tokenizer_files import store_tokenizer_files


def load_served_tokenizer(storage: FileStorage, home: Home, base: BaseModel) -> Tokenizer:
    """Load a tokenizer, once per process, from its folder or from the object store; blocks."""
    folder = base.tokenizer_folder
    try:
        if folder is not None and Path(folder).is_dir():
            return load_tokenizer(folder)
        if base.tokenizer_digest is not None and storage.has_blobs:
            return load_tokenizer(str(_fetch(storage, home, base.tokenizer_digest)))
    except (InvalidInput, CheckpointError, OSError) as error:
        # Without the reason, which may contain paths of the server.
        raise InvalidInput(f"the tokenizer of {base.name!r} cannot be loaded") from error
    raise InvalidInput(f"the base model {base.name!r} has no tokenizer on this server")


def _fetch(storage: FileStorage, home: Home, digest: str) -> Path:
    folder = home.tokenizers / digest
    if folder.is_dir():
        folder.touch()
    else:
        store_tokenizer_files(folder, read_published_tokenizer(storage, digest))
    return folder
