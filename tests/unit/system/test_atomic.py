"""Atomic directories and files: complete or absent, also after a crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinkex.system.atomic import (
    SCRATCH_PREFIX,
    new_directory,
    remove_directory,
    remove_scratch,
    write_file_atomic,
)


class Crash(Exception):
    """A failure in the middle of writing."""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "final"
    with new_directory(final) as scratch:
        (scratch / "sub").mkdir()
        (scratch / "sub" / "file").write_bytes(b"whole")
        assert not final.exists()
        assert scratch.parent == final.parent
    assert (final / "sub" / "file").read_bytes() == b"whole"
    assert names(final.parent) == ["final"]


def test_failed_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Crash), new_directory(tmp_path / "final") as scratch:
        (scratch / "file").write_bytes(b"half")
        raise Crash
    assert names(tmp_path) == []


def test_failed_block_leaves_the_existing_directory(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with new_directory(final) as scratch:
        (scratch / "old").touch()
    with pytest.raises(Crash), new_directory(final) as scratch:
        raise Crash
    assert names(final) == ["old"]


def test_existing_directory_is_replaced(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for name in ("old", "new"):
        with new_directory(final) as scratch:
            (scratch / name).touch()
    assert names(final) == ["new"]
    assert names(tmp_path) == ["final"]


def test_concurrent_writers_use_separate_scratch_directories(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with new_directory(final) as one:
        (one / "one").touch()
        with new_directory(final) as two:
            (two / "two").touch()
            assert names(two) == ["two"]
        assert names(final) == ["two"]
    assert names(final) == ["one"]


def test_file_is_replaced_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_file_atomic(path, b"old")
    write_file_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(path.parent) == ["file"]


def test_failed_file_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_file_atomic(path, b"old")

    def crash(descriptor: int) -> None:
        raise Crash

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(Crash):
        write_file_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_remove_directory_accepts_a_missing_one(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with new_directory(final) as scratch:
        (scratch / "file").touch()
    remove_directory(final)
    remove_directory(final)
    assert names(tmp_path) == []


def test_remove_scratch_removes_only_leftovers(tmp_path: Path) -> None:
    (tmp_path / f"{SCRATCH_PREFIX}1" / "sub").mkdir(parents=True)
    (tmp_path / f"{SCRATCH_PREFIX}2").touch()
    (tmp_path / "kept").mkdir()
    assert remove_scratch(tmp_path) == 2
    assert names(tmp_path) == ["kept"]


def test_crash_between_renames_keeps_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "final"
    with new_directory(final) as scratch:
        (scratch / "old").touch()
    rename = Path.rename

    def crash_at_publish(self: Path, target: Path) -> Path:
        if target == final:
            raise Crash
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", crash_at_publish)
        with pytest.raises(Crash), new_directory(final) as scratch:
            (scratch / "new").touch()
    assert names(tmp_path) == [".final.replaced"]
    remove_scratch(tmp_path)
    assert names(final) == ["old"]
    assert names(tmp_path) == ["final"]
