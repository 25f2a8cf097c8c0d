"""Locks of output directories: one run and one trainer at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tinkex import clock
from tinkex.errors import ConfigError
from tinkex.logs import get_logger
from tinkex.system.locks import LockHeld, is_locked, lock_descriptor
from tinkex.system.processes import is_alive

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


LOCK_NAME = "run.lock"


class RunLockHolder(msgspec.Struct, frozen=True):
    """The process that uses an output directory."""

    pid: int
    host: str
    since: str
    stage: str | None = None
    trainer_pid: int | None = None
    """The trainer; it holds the lock if it outlives the run."""


class RunLock:
    """A held lock; its file describes the holder."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        """Inherited by trainers, so that the lock is held as long as any of them runs."""
        self._holder = RunLockHolder(os.getpid(), socket.gethostname(), clock.utc_now().isoformat())
        self.write_holder(None, None)

    def write_holder(self, stage: str | None, trainer_pid: int | None) -> None:
        """Record the current stage and trainer process."""
        holder = msgspec.structs.replace(self._holder, stage=stage, trainer_pid=trainer_pid)
        content = msgspec.json.encode(holder)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, content, 0)


@contextlib.contextmanager
def lock_output_dir(out_dir: Path) -> Iterator[RunLock]:
    """Lock an output directory; raises ConfigError with a description of the holder."""
    path = out_dir / LOCK_NAME
    _create_output_dir(out_dir)
    try:
        with lock_and_clear(path) as descriptor:
            yield RunLock(descriptor)
    except LockHeld:
        raise _lock_error(out_dir, read_holder(path)) from None


def _create_output_dir(out_dir: Path) -> None:
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(out_dir, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"OUT_DIR: {out_dir} is not writable: {error.strerror}",
            hint="Set OUT_DIR to another directory.",
        ) from None


def _lock_error(out_dir: Path, holder: RunLockHolder | None) -> ConfigError:
    owner = describe_holder(holder) if holder else "another run"
    pid = (holder.trainer_pid if holder and not is_alive(holder.pid) else None) or (
        holder.pid if holder else None
    )
    return ConfigError(
        f"{out_dir} is in use by {owner}",
        hint=f"Wait for it, stop it{f' (kill {pid})' if pid else ''}, or set another OUT_DIR.",
    )


def find_holder(out_dir: Path) -> RunLockHolder | None:
    """Return the current holder of an output directory, or None."""
    path = out_dir / LOCK_NAME
    try:
        return read_holder(path) if is_locked(path) else None
    except OSError:  # a file system without locks
        return read_holder(path)


def read_holder(path: Path) -> RunLockHolder | None:
    """Read the holder from a lock file; None if it is empty or missing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunLockHolder)
    except (OSError, msgspec.DecodeError):
        return None


def describe_holder(holder: RunLockHolder) -> str:
    """Describe a holder for messages."""
    activity = f", training {holder.stage}" if holder.stage else ""
    if holder.trainer_pid is not None and not is_alive(holder.pid):
        return f"trainer {holder.trainer_pid} of a run that has ended{activity}"
    return f"process {holder.pid} on {holder.host} since {holder.since[:19]}{activity}"
