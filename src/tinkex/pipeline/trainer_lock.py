"""Locks: a directory is written to by one trainer at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.logs import get_logger
from tinkex.system.locks import LockHeld, lock_descriptor

#: Lock file of a running trainer in its output directory; contains its process id.
LOCK_FILE = "trainer.lock"

log = get_logger(__name__)


@contextmanager
def lock_and_clear(path: Path) -> Iterator[int]:
    """Lock a file, yield its descriptor, and empty the file at the end.

    Raises LockHeld if another process holds it. A file system without locks only gets a warning.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            is_locked = lock_descriptor(descriptor)
        except OSError as error:
            log.warning(
                "%s cannot be locked on this file system (%s): do not start two runs",
                path,
                error.strerror,
            )
            is_locked = True
        if not is_locked:
            raise LockHeld
        yield descriptor
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock a directory for this trainer; raises ConfigError with the owner's process id."""
    path = directory / LOCK_FILE
    try:
        with lock_and_clear(path) as descriptor:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
    except LockHeld:
        pid = path.read_text().strip()
        raise ConfigError(
            f"{directory} is in use by another trainer{f' (process {pid})' if pid else ''}",
            hint="Wait for it or stop it, or choose another --out_dir.",
        ) from None
