"""Stored checkpoints are compared with their manifest once per process, before they are used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from tinkex.checkpoint.manifest import Manifest, check_manifest, manifest_name, read_manifest
from tinkex.errors import CheckpointError

#: How many checkpoints a process remembers as verified.
MAX_VERIFIED = 4096

#: Name, size, time of the last change in nanoseconds, and inode of each file.
FileIdentities = tuple[tuple[str, int, int, int], ...]


class VerifiedCheckpoints:
    """Remembers which directories were found whole; a file that changed is hashed again."""

    def __init__(self, max_verified: int = MAX_VERIFIED) -> None:
        self._max_verified = max_verified
        self._verified: OrderedDict[Path, FileIdentities] = OrderedDict()
        self._lock = threading.Lock()

    def verify(self, directory: Path, name: object) -> None:
        """Raise CheckpointError about `name` unless sizes and digests are those of the manifest.

        Reads every byte the first time, so it may block for a while.
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
        """Take a directory as verified: this process has just written it and its manifest."""
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
            found = (directory / name).stat()
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"{name!r}: {reason}") from error
        yield name, found.st_size, found.st_mtime_ns, found.st_ino
