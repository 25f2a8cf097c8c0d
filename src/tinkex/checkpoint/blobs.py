"""Object storage for checkpoints, snapshots and large payloads; the only importer of obstore.

The files of a place are uploaded first and `MANIFEST` last, create-only. A place without a manifest
was never finished.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

import msgspec
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore, S3Store, from_url

from tinkex.checkpoint.manifest import Manifest, manifest_of_upload, parse_manifest
from tinkex.checkpoint.places import AREAS, STORE_ID_KEY, BlobsUnavailable, OutageGate
from tinkex.errors import CheckpointError, ConfigError
from tinkex.logs import get_logger
from tinkex.system.atomic import fsync_path
from tinkex.system.disk_errors import is_disk_full

LOG = get_logger(__name__)
SCHEMES = ("file", "s3", "gs", "az")
#: The object that completes a place: sizes and digests of its files.
BLOB_MANIFEST = "MANIFEST"
#: Rewritten to test whether objects can be written, and to read the clock of the object store.
PROBE_KEY = "probe"
#: The name of the single file of a payload.
PAYLOAD_NAME = "payload"
#: Bytes of a part of an upload, and of one read. Larger files have larger parts, because S3 allows
#: 10,000 of them.
PART_BYTES = 8 * 2**20
MAX_PARTS = 9_000
_MAX_CONCURRENT_PARTS = 4
_CLIENT_OPTIONS = {"connect_timeout": "3s", "timeout": "60s", "allow_http": True}
_STATUS = re.compile(r"status code: (\d{3} [A-Za-z ]+)")
_FULL_TEXTS = ("storagefull", "quotaexceeded", "507 insufficient", "insufficient storage")


class BlobStore:
    """The objects below one URL. Every method may block, and raises BlobsUnavailable."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store = _open_store(url)
        parts = urlsplit(url)
        self._root = Path(unquote(parts.path)) if parts.scheme == "file" else None
        self._gate = OutageGate()

    @property
    def is_available(self) -> bool:
        """Whether calls are tried at all; False shortly after a failure."""
        try:
            self._gate.check(time.monotonic())
        except BlobsUnavailable:
            return False
        return True

    # --- places ------------------------------------------------------------------------------
    def upload(self, place: str, directory: Path, done: set[str] | None = None) -> None:
        """Upload a directory with a manifest; `done` collects the files for a next attempt."""
        manifest = manifest_of_upload(directory)
        uploaded = set() if done is None else done
        for name, entry in manifest.files.items():
            if name not in uploaded:
                self._put_file(f"{place}/{name}", directory / name, entry.size)
                uploaded.add(name)
        self._commit(place, manifest)

    def _put_file(self, key: str, path: Path, size: int) -> None:
        with self._guarded(f"cannot upload {key}"):
            obstore.put(
                self._store,
                key,
                path,
                chunk_size=max(PART_BYTES, size // MAX_PARTS),
                max_concurrency=_MAX_CONCURRENT_PARTS,
            )
            self._sync(key)

    def _commit(self, place: str, manifest: Manifest) -> None:
        content = msgspec.json.encode(manifest)
        key = f"{place}/{BLOB_MANIFEST}"
        # The response to an earlier attempt may have been lost.
        if not self.create(key, content) and self.read(key) != content:
            raise CheckpointError(f"{place} was written by another process")

    def read_manifest(self, place: str) -> Manifest:
        """Return the names, sizes and digests of a place's files."""
        return parse_manifest(Path(place), self.read(f"{place}/{BLOB_MANIFEST}"))

    def check_complete(self, place: str, manifest: Manifest) -> None:
        """Raise CheckpointError if a file of a place is missing or has another size."""
        sizes = {key: size for key, size, _ in self._list(place)}
        for name, entry in manifest.files.items():
            size = sizes.get(f"{place}/{name}")
            if size != entry.size:
                found = "missing" if size is None else f"{size} bytes long, not {entry.size}"
                raise CheckpointError(f"{name!r} is {found} in the object store")

    def download(self, place: str, manifest: Manifest, directory: Path) -> None:
        """Download all files of a place; raises CheckpointError if a digest differs."""
        for name, entry in manifest.files.items():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with target.open("wb") as file:
                for block in self._read_blocks(f"{place}/{name}", entry.size):
                    digest.update(block)
                    file.write(block)
            if digest.hexdigest() != entry.sha256:
                raise CheckpointError(f"{name!r} is damaged in the object store")

    def _read_blocks(self, key: str, size: int) -> Iterator[memoryview]:
        # Ranges, because the timeout of a request includes its body.
        for start in range(0, size, PART_BYTES):
            end = min(size, start + PART_BYTES)
            with self._guarded(f"cannot read {key}"):
                block = obstore.get_range(self._store, key, start=start, end=end)
            if len(block) != end - start:
                raise CheckpointError(f"{key!r} is truncated in the object store")
            yield memoryview(block)

    def remove(self, place: str) -> None:
        """Remove all objects of a place, the manifest first; it may be missing."""
        keys = sorted(
            (key for key, _, _ in self._list(place)),
            key=lambda key: not key.endswith(f"/{BLOB_MANIFEST}"),
        )
        for some in (keys[:1], keys[1:]):
            self._delete(some)

    def list_places(self) -> dict[str, float]:
        """Return all places with the time of their newest object, by the store's clock."""
        places: dict[str, float] = {}
        for area in AREAS:
            for key, _, changed_at in self._list(area):
                place = "/".join(key.split("/", 3)[:3])
                places[place] = max(changed_at, places.get(place, 0.0))
        return places

    # --- single objects ------------------------------------------------------------------------
    def create(self, key: str, content: bytes) -> bool:
        """Store an object; returns False if the key exists."""
        with self._guarded(f"cannot write {key}"):
            try:
                obstore.put(self._store, key, content, mode="create")
            except AlreadyExistsError:
                return False
            self._sync(key)
        return True

    def read(self, key: str) -> bytes:
        """Return an object; raises CheckpointError if it does not exist."""
        with self._guarded(f"cannot read {key}"):
            return bytes(obstore.get(self._store, key).bytes())

    def create_payload(self, place: str, content: bytes) -> None:
        """Store a payload at a new place."""
        self.create(f"{place}/{PAYLOAD_NAME}", content)

    def read_payload(self, place: str) -> bytes:
        """Return a payload; raises CheckpointError if it is missing or damaged."""
        for _ in range(2):  # perhaps it is damaged on the way
            content = self.read(f"{place}/{PAYLOAD_NAME}")
            if hashlib.sha256(content).hexdigest() == place.split("/")[1]:
                return content
        raise CheckpointError(f"{place} is damaged in the object store")

    def write_probe(self) -> float:
        """Write an object and return its time: the clock of the object store."""
        with self._guarded("cannot write"):
            obstore.put(self._store, PROBE_KEY, b"")
            return obstore.head(self._store, PROBE_KEY)["last_modified"].timestamp()

    def sign(self, keys: Sequence[str], seconds: float) -> list[str] | None:
        """Return URLs for downloads, or None if this object store cannot sign them."""
        if self._root is not None:
            return None
        store = cast(S3Store, self._store)
        try:
            urls = obstore.sign(store, "GET", list(keys), timedelta(seconds=seconds))
        except (BaseError, ValueError) as error:
            LOG.warning("downloads go through the server, because %s", describe_failure(error))
            return None
        return list(urls)

    def _list(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        with self._guarded(f"cannot list {prefix}"):
            for page in obstore.list(self._store, prefix):
                for meta in page:
                    yield meta["path"], meta["size"], meta["last_modified"].timestamp()

    def _delete(self, keys: Sequence[str]) -> None:
        with self._guarded("cannot delete objects"), suppress(FileNotFoundError):
            if keys:
                obstore.delete(self._store, list(keys))

    def _sync(self, key: str) -> None:
        """Flush an object of a file:// store to disk; other stores answer when it is durable."""
        if self._root is not None:
            fsync_path(self._root / key)
            fsync_path((self._root / key).parent)

    def _has_store_id(self) -> bool:
        """Whether the files of the store are here: not an empty bucket or an unmounted disk."""
        try:
            obstore.head(self._store, STORE_ID_KEY)
        except (BaseError, OSError):
            return False
        return True

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Translate errors of the library, and remember outages."""
        self._gate.check(time.monotonic())
        try:
            yield
        except (BaseError, OSError) as error:
            if isinstance(error, FileNotFoundError) and self._has_store_id():
                raise CheckpointError(f"{what}: it does not exist in the object store") from error
            reason = f"{what}: {describe_failure(error)}"
            if self._gate.record_failure(reason, time.monotonic()):
                LOG.warning("the object store is unavailable: %s", reason)
            raise BlobsUnavailable(reason) from error
        if self._gate.record_success():
            LOG.info("the object store is available again")


def describe_failure(error: Exception) -> str:
    """Return why a call failed, in a few words."""
    text = str(error)
    lowered = text.lower()
    if "nosuchbucket" in lowered:
        return "the bucket does not exist"
    if isinstance(error, FileNotFoundError):
        return "the files of this store are not there"
    refused = ("invalidaccesskeyid", "signaturedoesnotmatch", "403 forbidden")
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or any(
        word in lowered for word in refused
    ):
        return "the object store refuses the credentials"
    if is_disk_full(error) or any(word in lowered for word in _FULL_TEXTS):
        return "the object store is full"
    if "error sending request" in lowered:
        return "the object store cannot be reached"
    status = _STATUS.search(text)
    return f"the object store answered {status[1]}" if status else text.partition("\n")[0][:300]


def _open_store(url: str) -> ObjectStore:
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES or "://" not in url:
        raise ConfigError(
            f"blobs is {url!r}; expected file:///DIRECTORY, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX "
            "or az://CONTAINER/PREFIX"
        )
    try:
        if scheme == "file":
            return from_url(url, mkdir=True, automatic_cleanup=True)
        retry = {
            "max_retries": 3,
            "retry_timeout": timedelta(seconds=15),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        }
        return from_url(url, client_options=_CLIENT_OPTIONS, retry_config=retry)  # type: ignore[call-overload, no-any-return]
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(f"blobs is {url!r}: {str(error).partition(chr(10))[0]}") from error
