"""Directories and files that appear whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinkex.ids import new_id
from tinkex.system.disk_errors import convert_disk_full

#: Names that begin so are being written, or were when their writer died.
SCRATCH_PREFIX = ".partial-"


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a scratch directory that becomes `final` when the block ends well, else vanishes.

    A `final` that exists is replaced: it was written by an attempt whose record was lost. A full
    disk is an OSError about `final`, however the library that wrote reports it.
    """
    scratch = final.with_name(f"{SCRATCH_PREFIX}{new_id()}")
    with convert_disk_full(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
    try:
        with convert_disk_full(final):
            yield scratch
            fsync_tree(scratch)
            if final.exists():
                remove_directory(final)
            scratch.rename(final)
            fsync_path(final.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_file_atomic(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file that is seen whole or not at all, readable by its owner alone by default."""
    scratch = path.with_name(f"{SCRATCH_PREFIX}{new_id()}")
    with convert_disk_full(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with convert_disk_full(path):
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
            fsync_path(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def remove_directory(path: Path) -> None:
    """Take a directory away at once under its name, then its content; absent is no error."""
    doomed = path.with_name(f"{SCRATCH_PREFIX}{new_id()}")
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def remove_scratch(parent: Path) -> int:
    """Remove what dead writers left in a directory; returns how many there were."""
    left = list(parent.glob(f"{SCRATCH_PREFIX}*"))
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return len(left)


def fsync_tree(directory: Path) -> None:
    """Make sure that every file below, and every name, is on disk."""
    for path in directory.rglob("*"):
        fsync_path(path)
    fsync_path(directory)


def fsync_path(path: Path) -> None:
    """Make sure that a file's content, or a directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
