"""The home directory: state file, lock and permissions."""

from __future__ import annotations

import fcntl
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.server_discovery import (
    LockHolder,
    ServerState,
    find_lock_holder,
    find_server,
    read_state,
)

STATE = ServerState(pid=1, url="http://127.0.0.1:1", version="0", started_at=1.0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "deep" / "home")
    home.create()
    return home


def test_home_is_private(home: Home) -> None:
    assert home.root.stat().st_mode & 0o777 == 0o700


def test_uncreatable_home_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot create the home .*file/home: Not a directory"):
        Home(tmp_path / "file" / "home").create()


def test_missing_files_mean_no_server(home: Home) -> None:
    assert read_state(home) is None
    assert find_server(home) is None
    assert find_lock_holder(home) is None


def test_state_round_trip(home: Home) -> None:
    home.state_file.write_bytes(msgspec.json.encode(STATE))
    assert read_state(home) == STATE


@given(st.binary(max_size=60))
def test_damaged_state_file_is_ignored(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    home = Home(tmp_path_factory.mktemp("home"))
    home.state_file.write_bytes(content)
    assert read_state(home) is None


def test_lock_holder_is_found_while_locked(home: Home) -> None:
    with home.server_lock.open("w") as file:
        file.write("4711")
        file.flush()
        # The file is not locked, so its content is outdated.
        assert find_lock_holder(home) is None
        fcntl.flock(file, fcntl.LOCK_EX)
        held = find_lock_holder(home)
        assert held is not None
        assert held.pid == 4711
    assert find_lock_holder(home) is None


@given(st.binary(max_size=40))
def test_any_lock_file_content_is_parsed(content: bytes) -> None:
    held = LockHolder.parse(content)
    assert held is None or held.pid >= 0
