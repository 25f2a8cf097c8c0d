"""Atomic directories and files: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tinkex.ids import new_id
from tinkex.system.disk_errors import convert_disk_full

#: Prefix of temporary names; without a running writer they are leftovers of a crash.
SCRATCH_PREFIX = ".partial-"
_REPLACED_SUFFIX = ".replaced"


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `final` when the block succeeds, else is removed.

    An existing `final` is replaced. A full disk is raised as an OSError about `final`, regardless
    of how the library that wrote reports it.
    """
    scratch = final.with_name(f"{SCRATCH_PREFIX}{new_id()}")
    with convert_disk_full(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
    try:
        with convert_disk_full(final):
            yield scratch
            publish_directory(scratch, final, replace=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish_directory(staging: Path, destination: Path, *, replace: bool = False) -> None:
    """Sync a finished directory and rename it to its final name.

    A directory that it replaces is renamed first and deleted last, so that one of the two survives
    a crash: `recover_directory` restores it.
    """
    fsync_tree(staging)
    replaced = _replaced_path(destination)
    if replace and destination.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        with suppress(FileNotFoundError):  # another process has just replaced it
            destination.rename(replaced)
    try:
        staging.rename(destination)
    except OSError:
        recover_directory(destination)
        raise
    fsync_path(destination.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover_directory(destination: Path) -> None:
    """Complete or undo a replacement that a crash interrupted."""
    replaced = _replaced_path(destination)
    if not replaced.exists():
        return
    if destination.exists():
        shutil.rmtree(replaced)
    else:
        replaced.rename(destination)


def _replaced_path(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}{_REPLACED_SUFFIX}")


def write_file_atomic(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file atomically, by default readable by its owner alone."""
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
    """Remove a directory: its name disappears at once, then its content. It may be missing."""
    scratch = path.with_name(f"{SCRATCH_PREFIX}{new_id()}")
    try:
        path.rename(scratch)
    except FileNotFoundError:
        return
    shutil.rmtree(scratch, ignore_errors=True)


def remove_scratch(parent: Path) -> int:
    """Clean up after crashed writers; returns the number of temporary files and directories.

    Interrupted replacements are recovered. No writer may be active in the directory.
    """
    leftovers = list(parent.glob(f"{SCRATCH_PREFIX}*"))
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for path in parent.glob(f".*{_REPLACED_SUFFIX}"):
        recover_directory(path.with_name(path.name[1 : -len(_REPLACED_SUFFIX)]))
    return len(leftovers)


def fsync_tree(directory: Path) -> None:
    """Flush a directory tree to disk: file contents and names."""
    for path in directory.rglob("*"):
        fsync_path(path)
    fsync_path(directory)


def fsync_path(path: Path) -> None:
    """Flush a file's content, or a directory's names, to disk."""
    if os.name != "posix" and path.is_dir():
        return  # only POSIX opens directories
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
