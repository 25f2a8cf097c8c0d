"""Stored checkpoints are compared with their manifest once per process, before they are used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from tinkex.checkpoint.manifest import Manifest, check_manifest, manifest_name, read_manifest
from tinkex.errors import CheckpointError

#: How many checkpoints a process remembers as verified.
MAX_REMEMBERED = 4096

#: Name, size, time of the last change in nanoseconds, and inode of each file.
Identity = tuple[tuple[str, int, int, int], ...]


class VerifiedCheckpoints:
    """Remembers which directories were found whole; a file that changed is hashed again."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._known: OrderedDict[Path, Identity] = OrderedDict()
        self._lock = threading.Lock()

    def verify(self, directory: Path, name: object) -> None:
        """Raise CheckpointError about `name` unless sizes and digests are those of the manifest.

        Reads every byte the first time, so it may block for a while.
        """
        if not directory.is_dir():
            raise CheckpointError(f"checkpoint {name} has no files: it was deleted or has expired")
        try:
            manifest = read_manifest(directory)
            identity = _identify(directory, manifest)
            with self._lock:
                is_known = self._known.get(directory) == identity
            if not is_known:
                check_manifest(directory)
                self._remember(directory, identity)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {name} is damaged on the server: {error.message}"
            ) from error.__cause__

    def remember(self, directory: Path) -> None:
        """Take a directory as verified: this process has just written it and its manifest."""
        self._remember(directory, _identify(directory, read_manifest(directory)))

    def _remember(self, directory: Path, identity: Identity) -> None:
        with self._lock:
            self._known[directory] = identity
            self._known.move_to_end(directory)
            if len(self._known) > self._max_remembered:
                self._known.popitem(last=False)


def _identify(directory: Path, manifest: Manifest) -> Identity:
    return tuple(_identities(directory, (manifest_name(directory), *sorted(manifest.files))))


def _identities(directory: Path, names: tuple[str, ...]) -> Iterator[tuple[str, int, int, int]]:
    for name in names:
        try:
            found = (directory / name).stat()
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"{name!r}: {reason}") from error
        yield name, found.st_size, found.st_mtime_ns, found.st_ino
