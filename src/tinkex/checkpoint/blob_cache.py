"""Local copies of places in the object store: bounded, least recently used, pinned while read.

A copy is a directory that appears when it is complete and verified. Processes that share the
directory coordinate by locks on the copies: readers share them, eviction needs one for itself.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from tinkex import clock
from tinkex.checkpoint.manifest import Manifest
from tinkex.errors import CheckpointError
from tinkex.ids import new_id
from tinkex.logs import get_logger
from tinkex.system.atomic import SCRATCH_PREFIX, new_directory, publish_directory
from tinkex.system.locks import LockHeld, file_lock, lock_descriptor

if TYPE_CHECKING:
    from tinkex.checkpoint.blobs import BlobStore

LOG = get_logger(__name__)
#: Older temporary directories were left behind by a crash.
SCRATCH_AGE_SECONDS = 86_400.0
_LOCK_NAME = ".lock"
#: Attempts to read a copy that other processes evict at the same time.
_MAX_ATTEMPTS = 5


class Pin:
    """Keeps a local copy from being evicted until it is closed."""

    def __init__(self, directory: Path, descriptor: int = -1) -> None:
        self.directory = directory
        self._descriptor = descriptor

    def close(self) -> None:
        """Allow eviction again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class BlobCache:
    """The local copies of one home."""

    def __init__(self, store: BlobStore, root: Path, max_bytes: int) -> None:
        self.store = store
        self._root = root
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._fetch_locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def local_path(self, place: str) -> Path:
        """Return where the copy of a place is, if there is one."""
        return self._root / place.replace("/", "~")

    @contextmanager
    def new_copy(self, place: str) -> Iterator[Pin]:
        """Yield a directory that becomes the copy of a new place; the caller closes the pin."""
        final = self.local_path(place)
        with new_directory(final) as scratch:
            # Locked before it has its name, so that it cannot be evicted before it is uploaded.
            descriptor = os.open(scratch, os.O_RDONLY)
            lock_descriptor(descriptor, shared=True)
            pin = Pin(scratch, descriptor)
            try:
                yield pin
            except BaseException:
                pin.close()
                raise
        pin.directory = final
        self.evict()

    def pin(self, place: str) -> Pin:
        """Return a verified local copy, downloaded if necessary."""
        for _ in range(_MAX_ATTEMPTS):
            pin = self.pin_local(place)
            if pin is not None:
                return pin
            self._fetch(place)
        raise CheckpointError(f"{place} was evicted again and again; raise blob_cache_bytes")

    def pin_local(self, place: str) -> Pin | None:
        """Return the local copy, or None if there is none."""
        directory = self.local_path(place)
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:
            return None
        if lock_descriptor(descriptor, shared=True) and _is_same(descriptor, directory):
            now = clock.wall_now()  # the kernel's own time is coarser
            os.utime(directory, (now, now))
            return Pin(directory, descriptor)
        os.close(descriptor)
        return None

    def drop(self, place: str) -> None:
        """Remove the local copy, because it is damaged or its place is removed."""
        _remove_unpinned(self.local_path(place), is_forced=True)

    def _fetch(self, place: str) -> None:
        with self._lock:
            fetch_lock = self._fetch_locks.setdefault(place, threading.Lock())
        with fetch_lock:
            if self.local_path(place).is_dir():
                return
            manifest = self.store.read_manifest(place)
            self.evict(reserve_bytes=manifest.total_bytes)
            self._root.mkdir(parents=True, exist_ok=True)
            scratch = self._root / f"{SCRATCH_PREFIX}{new_id()}"
            scratch.mkdir()
            try:
                self._download(place, manifest, scratch)
                self._publish(scratch, place)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)

    def _download(self, place: str, manifest: Manifest, scratch: Path) -> None:
        try:
            self.store.download(place, manifest, scratch)
        except CheckpointError as error:
            # Perhaps it was damaged on the way.
            LOG.warning("reading %s again: %s", place, error)
            self.store.download(place, manifest, scratch)

    def _publish(self, scratch: Path, place: str) -> None:
        try:
            publish_directory(scratch, self.local_path(place))
        except OSError:
            # Another process was faster, and its copy has the same bytes.
            if not self.local_path(place).is_dir():
                raise

    def evict(self, reserve_bytes: int = 0) -> None:
        """Remove the copies used least recently until the limit holds; pinned ones stay."""
        self._root.mkdir(parents=True, exist_ok=True)
        try:
            with file_lock(self._root / _LOCK_NAME):
                self._evict(reserve_bytes)
        except LockHeld:
            # Another process is evicting, and the next fetch checks again.
            return

    def _evict(self, reserve_bytes: int) -> None:
        before = min(clock.now(), clock.wall_now()) - SCRATCH_AGE_SECONDS
        copies: list[tuple[float, int, Path]] = []
        for path in self._root.iterdir():
            if path.name == _LOCK_NAME:
                continue
            used_at = _modified_at(path)
            if not path.name.startswith(SCRATCH_PREFIX):
                copies.append((used_at, _directory_bytes(path), path))
            elif used_at < before:
                shutil.rmtree(path, ignore_errors=True)
        total = reserve_bytes + sum(size for _, size, _ in copies)
        for _, size, path in sorted(copies):
            if total <= self._max_bytes:
                return
            if _remove_unpinned(path):
                total -= size


def _is_same(descriptor: int, directory: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), directory.stat())
    except FileNotFoundError:
        return False


def _remove_unpinned(directory: Path, *, is_forced: bool = False) -> bool:
    """Remove a copy unless it is pinned; a forced removal leaves the open files of readers."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        if not lock_descriptor(descriptor) and not is_forced:
            return False
        scratch = directory.with_name(f"{SCRATCH_PREFIX}{new_id()}")
        try:
            directory.rename(scratch)
        except FileNotFoundError:
            return True
    finally:
        os.close(descriptor)
    shutil.rmtree(scratch, ignore_errors=True)
    return True


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _directory_bytes(directory: Path) -> int:
    """The size of a copy; another process may remove it at any time."""
    total = 0
    # Unlike rglob, os.walk skips directories that disappear.
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total
