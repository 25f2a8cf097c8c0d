"""One run at a time in an output directory: the second is told who holds it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tinkex import clock
from tinkex.errors import ConfigError
from tinkex.pipeline.trainer_lock import lock_and_clear
from tinkex.system.locks import LockHeld, is_locked
from tinkex.system.processes import is_alive

LOCK_NAME = "run.lock"


class RunLockHolder(msgspec.Struct, frozen=True):
    """Who works in a directory."""

    pid: int
    host: str
    since: str
    stage: str | None = None
    trainer_pid: int | None = None
    """The trainer's process; it keeps the lock should it outlive the run."""


class RunLock:
    """The lock while it is held; says what its holder does."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        """Given to trainers, so that the lock lasts as long as any of them writes."""
        self._holder = RunLockHolder(os.getpid(), socket.gethostname(), clock.utc_now().isoformat())
        self.write_holder(None, None)

    def write_holder(self, stage: str | None, trainer_pid: int | None) -> None:
        """Write down which stage is being trained, and by which process."""
        holder = msgspec.structs.replace(self._holder, stage=stage, trainer_pid=trainer_pid)
        content = msgspec.json.encode(holder)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, content, 0)


@contextlib.contextmanager
def lock_output_dir(out_dir: Path) -> Iterator[RunLock]:
    """Hold a directory, or say who does."""
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
            f"OUT_DIR is {out_dir}, where nothing can be written: {error.strerror}",
            hint="Set OUT_DIR to another directory.",
        ) from None


def _lock_error(out_dir: Path, holder: RunLockHolder | None) -> ConfigError:
    who = describe_holder(holder) if holder else "another run"
    pid = (holder.trainer_pid if holder and not is_alive(holder.pid) else None) or (
        holder.pid if holder else None
    )
    return ConfigError(
        f"{out_dir} is in use by {who}",
        hint=f"Wait for it, stop it{f' (kill {pid})' if pid else ''}, or set another OUT_DIR.",
    )


def find_holder(out_dir: Path) -> RunLockHolder | None:
    """Who works in a directory now; None if nobody does."""
    path = out_dir / LOCK_NAME
    try:
        return read_holder(path) if is_locked(path) else None
    except OSError:  # a file system without locks
        return read_holder(path)


def read_holder(path: Path) -> RunLockHolder | None:
    """What the lock file says; None if it says nothing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunLockHolder)
    except (OSError, msgspec.DecodeError):
        return None


def describe_holder(holder: RunLockHolder) -> str:
    """A holder in words."""
    doing = f", training {holder.stage}" if holder.stage else ""
    if holder.trainer_pid is not None and not is_alive(holder.pid):
        return f"trainer {holder.trainer_pid} of a run that has ended{doing}"
    return f"process {holder.pid} on {holder.host} since {holder.since[:19]}{doing}"
