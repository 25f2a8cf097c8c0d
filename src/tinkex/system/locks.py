"""Advisory file locks. The kernel releases them when the last holder of the descriptor ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl


class LockHeld(Exception):
    """Another process holds the lock."""


@contextmanager
def file_lock(path: Path, *, wait: bool = False, mode: int = 0o600) -> Iterator[int]:
    """Lock a file for this process alone and yield its descriptor; the file is created if missing.

    Raises LockHeld if another process holds the lock, unless `wait` is set.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        if not lock_descriptor(descriptor, wait=wait):
            raise LockHeld
        yield descriptor
    finally:
        os.close(descriptor)


def lock_descriptor(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file; returns False if another process holds it. Windows has no such locks."""
    if sys.platform == "win32":
        return True
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, operation if wait else operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return whether a process holds a file for itself alone; a missing file is not locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two processes that only check do not see each other's lock.
        return not lock_descriptor(descriptor, shared=True)
    finally:
        os.close(descriptor)
