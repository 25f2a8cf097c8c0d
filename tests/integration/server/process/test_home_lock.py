"""The lock of a home: held by a running server, released by a dead one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.server.process import home_setup
from tinkex.server.process.home_setup import HomeLock
from tinkex.server_discovery import LockHolder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only /proc shows processes")

SLEEP_SCRIPT = "import sys, fcntl, time; print('held', flush=True); time.sleep(600)"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(home_setup, "ORPHAN_WAIT_SECONDS", 1.0)
    home = Home(tmp_path / "home")
    home.create()
    return home


@contextlib.contextmanager
def lock_held_by_process(
    home: Home, content: bytes, name: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the home's lock like a child of a supervisor."""
    with home.server_lock.open("w+b") as file:
        file.write(content)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", SLEEP_SCRIPT, name],
            pass_fds=[file.fileno()],
            stdout=subprocess.PIPE,
        )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def ended_holder() -> LockHolder:
    """The lock holder of an ended supervisor."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return LockHolder(process.pid, "1")


def test_orphaned_process_is_terminated(home: Home) -> None:
    with lock_held_by_process(
        home, ended_holder().encode(), "tinkex.server.process.api_process"
    ) as orphan:
        lock = HomeLock.acquire(home)
        assert orphan.wait(60) != 0
    lock.release()


def test_reused_pid_does_not_block_lock(home: Home) -> None:
    reused = LockHolder(os.getpid(), "1")
    with lock_held_by_process(home, reused.encode(), "tinkex.server.process.worker_process"):
        HomeLock.acquire(home).release()


def test_running_server_keeps_home_lock(home: Home) -> None:
    with (
        lock_held_by_process(
            home, LockHolder.current().encode(), "tinkex.server.process.api_process"
        ) as child,
        pytest.raises(ConfigError, match=f"a server with pid {os.getpid()} is already running in"),
    ):
        HomeLock.acquire(home)
    assert child.returncode is not None


def test_home_locked_by_unlisted_process_is_rejected(home: Home) -> None:
    with lock_held_by_process(home, ended_holder().encode(), "another-program") as process:
        with pytest.raises(ConfigError, match="a server that is not visible on this machine"):
            HomeLock.acquire(home)
        assert process.poll() is None


def test_stale_lock_file_does_not_block(home: Home) -> None:
    home.server_lock.write_bytes(str(os.getpid()).encode())
    lock = HomeLock.acquire(home)
    assert LockHolder.parse(home.server_lock.read_bytes()) == LockHolder.current()
    lock.release()
