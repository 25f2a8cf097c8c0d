"""Directories that one process at a time may write to."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.logs import get_logger

#: In whatever a trainer writes to, for as long as it does; holds the number of its process.
LOCK_FILE = "trainer.lock"

log = get_logger(__name__)


class LockHeld(Exception):
    """Somebody else holds it."""


@contextmanager
def file_lock(path: Path) -> Iterator[int]:
    """Hold a file and yield its descriptor; the system lets go of it if this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeld from None
        except OSError as error:
            log.warning("%s cannot be locked here (%s): start one run alone", path, error.strerror)
        yield descriptor
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Be the one trainer that writes to a directory, or say which process is."""
    path = directory / LOCK_FILE
    try:
        with file_lock(path) as descriptor:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
    except LockHeld:
        pid = path.read_text().strip()
        raise ConfigError(
            f"{directory} is in use by another trainer{f' (process {pid})' if pid else ''}",
            hint="Wait for it or stop it, or give another --out_dir.",
        ) from None


def is_alive(pid: int) -> bool:
    """Whether a process of this number is there, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
