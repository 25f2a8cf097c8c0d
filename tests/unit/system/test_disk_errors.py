"""A full disk is recognised in the words of every library that writes."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from tinkex.system.atomic import new_directory, write_file_atomic
from tinkex.system.disk_errors import convert_disk_full, is_disk_full

#: As safetensors 0.5, torch 2.13 and SQLite report it, without an errno.
REPORTS = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
    RuntimeError("basic_ios::clear: iostream error"),
    sqlite3.OperationalError("database or disk is full"),
]
OTHERS = [
    OSError(errno.EACCES, "Permission denied"),
    RuntimeError("[enforce fail at inline_container.cc:145] . failed finding central directory"),
    ValueError("a bad row"),
]


@pytest.mark.parametrize("error", REPORTS)
def test_full_disk_raises_oserror_and_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    assert is_disk_full(error)
    with (
        pytest.raises(OSError, match="No space left on device") as raised,
        new_directory(tmp_path / "a") as scratch,
    ):
        (scratch / "half").write_bytes(b"half")
        raise error
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_pass_unchanged(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, convert_disk_full(tmp_path):
        raise error
    assert raised.value is error


def test_error_caused_by_full_disk_is_detected() -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("the writer is in a bad state")  # noqa: B904 - as libraries do
    except RuntimeError as error:
        assert is_disk_full(error)
    assert not is_disk_full(None)


def test_disk_full_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"a\.json") as raised:
        write_file_atomic(tmp_path / "a.json", b"{}")
    assert raised.value.filename == str(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []
