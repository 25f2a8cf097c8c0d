"""Files with secrets: changed by one process at a time, as a whole, readable by their owner."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Let no other process change a file meanwhile, nor create it."""
    lock = path.with_name(f".{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is whole or the old one, whatever happens."""
    scratch = path.with_name(f".{path.name}.{uuid4().hex}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
