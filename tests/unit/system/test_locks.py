"""File locks: exclusive, shared and waiting."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tinkex.system.locks import LockHeld, file_lock, is_locked, lock_descriptor


def test_second_lock_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with file_lock(path):
        assert is_locked(path)
        with pytest.raises(LockHeld), file_lock(path):
            pass
    assert not is_locked(path)
    with file_lock(path):
        assert path.stat().st_mode & 0o777 == 0o600


def test_waiting_lock_continues_after_release(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    order: list[str] = []

    def second() -> None:
        with file_lock(path, wait=True):
            order.append("second")

    with file_lock(path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=0.1)
        assert thread.is_alive()
        order.append("first")
    thread.join(timeout=10.0)
    assert order == ["first", "second"]


def test_shared_locks_do_not_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open() as one, path.open() as two:
        assert lock_descriptor(one.fileno(), shared=True)
        assert lock_descriptor(two.fileno(), shared=True)
        assert not is_locked(path)
        assert not lock_descriptor(two.fileno())
