"""Tokenizers in the object store, for API processes that cannot read the folders of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from tinkex.checkpoint.places import BlobsUnavailable
from tinkex.checkpoint.storage import FileStorage
from tinkex.engine.protocol import BaseModel
from tinkex.errors import InvalidInput
from tinkex.logs import get_logger
from tinkex.tokenizer_files import check_tokenizer_files, digest_files, read_tokenizer_files

LOG = get_logger(__name__)


class TokenizerPublisher:
    """Uploads the tokenizers of base models, each once."""

    def __init__(self, storage: FileStorage) -> None:
        self._storage = storage
        self._is_complete = not storage.has_blobs
        self._digests: dict[str, str | None] = {}
        """The digests of tokenizers by folder; None for folders that cannot be read."""

    def forget(self) -> None:
        """Look at all base models again, because the list has changed."""
        self._is_complete = not self._storage.has_blobs

    def publish(self, list_models: Callable[[], Sequence[BaseModel]]) -> bool:
        """Upload what is not in the object store; returns whether something was uploaded.

        During an outage the next call continues.
        """
        if self._is_complete or not self._storage.is_available:
            return False
        before = len(self._digests)
        try:
            folders = {model.tokenizer_folder for model in list_models()}
            for folder in folders - {None, *self._digests}:
                self._digests[str(folder)] = self._upload(Path(str(folder)))
            self._is_complete = True
        except BlobsUnavailable as error:
            LOG.debug("the tokenizers wait for the object store: %s", error)
        return len(self._digests) > before

    def _upload(self, folder: Path) -> str | None:
        try:
            files = read_tokenizer_files(folder)
        except (OSError, InvalidInput) as error:
            LOG.warning("cannot read the tokenizer in %s: %s", folder, error)
            return None
        digest = digest_files(files)
        # One object, so that it is complete or missing.
        self._storage.cache.store.create(_object_key(digest), msgspec.msgpack.encode(files))
        return digest

    def describe(self, model: BaseModel) -> BaseModel:
        """Return a base model with the digest of its tokenizer in the object store."""
        return replace(model, tokenizer_digest=self._digests.get(model.tokenizer_folder or ""))


def read_published_tokenizer(storage: FileStorage, digest: str) -> dict[str, bytes]:
    """Return the files of a tokenizer in the object store; raises InvalidInput if damaged."""
    content = storage.cache.store.read(_object_key(digest))
    try:
        files = msgspec.msgpack.decode(content, type=dict[str, bytes])
    except msgspec.DecodeError as error:
        raise InvalidInput(f"its object is damaged: {error}") from None
    check_tokenizer_files(files, digest)
    return files


def _object_key(digest: str) -> str:
    return f"tokenizers/{digest}"
