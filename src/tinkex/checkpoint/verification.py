"""Verify stored checkpoints against their manifest, once per process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from tinkex.checkpoint.manifest import Manifest, check_manifest, manifest_name, read_manifest
from tinkex.errors import CheckpointError

#: Maximum number of remembered checkpoints.
MAX_VERIFIED = 4096

#: Name, size, time of the last change in nanoseconds, and inode of each file.
FileIdentities = tuple[tuple[str, int, int, int], ...]


class VerifiedCheckpoints:
    """Remembers verified directories; changed files are verified again."""

    def __init__(self, max_verified: int = MAX_VERIFIED) -> None:
        self._max_verified = max_verified
        self._verified: OrderedDict[Path, FileIdentities] = OrderedDict()
        self._lock = threading.Lock()

    def verify(self, directory: Path, name: object) -> None:
        """Raise CheckpointError about `name` unless the files match the manifest.

        Hashes all files the first time, so it may block for a while.
        """
        if not directory.is_dir():
            raise CheckpointError(f"checkpoint {name} has no files: it was deleted or has expired")
        try:
            manifest = read_manifest(directory)
            identity = _directory_identity(directory, manifest)
            with self._lock:
                is_known = self._verified.get(directory) == identity
            if not is_known:
                check_manifest(directory)
                self._store(directory, identity)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {name} is damaged on the server: {error.message}"
            ) from error.__cause__

    def mark_verified(self, directory: Path) -> None:
        """Mark a directory as verified that this process has just written."""
        self._store(directory, _directory_identity(directory, read_manifest(directory)))

    def _store(self, directory: Path, identity: FileIdentities) -> None:
        with self._lock:
            self._verified[directory] = identity
            self._verified.move_to_end(directory)
            if len(self._verified) > self._max_verified:
                self._verified.popitem(last=False)


def _directory_identity(directory: Path, manifest: Manifest) -> FileIdentities:
    return tuple(_file_identities(directory, (manifest_name(directory), *sorted(manifest.files))))


def _file_identities(
    directory: Path, names: tuple[str, ...]
) -> Iterator[tuple[str, int, int, int]]:
    for name in names:
        try:
            status = (directory / name).stat()
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"{name!r}: {reason}") from error
        yield name, status.st_size, status.st_mtime_ns, status.st_ino
