"""Which process holds a home: dead ones and reused pids."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tinkex.home import Home
from tinkex.server_discovery import (
    LockHolder,
    ServerState,
    find_server,
)

STATE = ServerState(pid=1, url="http://127.0.0.1:1", version="0", started_at=1.0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "deep" / "home")
    home.create()
    return home


def gone() -> int:
    """Return the pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_dead_server_is_not_found(home: Home) -> None:
    dead = msgspec.structs.replace(STATE, pid=gone())
    home.state_file.write_bytes(msgspec.json.encode(dead))
    assert find_server(home) is None


def test_reused_pid_is_not_the_holder() -> None:
    me = LockHolder.current()
    assert me.is_alive
    assert LockHolder.parse(me.encode()) == me
    if me.start_time:
        assert not me._replace(start_time=str(int(me.start_time) - 1)).is_alive
    # Older versions wrote only the pid.
    assert LockHolder(os.getpid(), "").is_alive
    assert not LockHolder(gone(), "").is_alive
