"""What appears on disk appears whole, whatever happens on the way."""

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
    """Something that goes wrong in the middle."""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "final"
    with new_directory(final) as scratch:
        (scratch / "sub").mkdir()
        (scratch / "sub" / "file").write_bytes(b"whole")
        assert not final.exists()
        assert scratch.parent == final.parent
    assert (final / "sub" / "file").read_bytes() == b"whole"
    assert names(final.parent) == ["final"]


def test_a_crash_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Crash), new_directory(tmp_path / "final") as scratch:
        (scratch / "file").write_bytes(b"half")
        raise Crash
    assert names(tmp_path) == []


def test_a_crash_leaves_what_was_there_before(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with new_directory(final) as scratch:
        (scratch / "old").touch()
    with pytest.raises(Crash), new_directory(final) as scratch:
        raise Crash
    assert names(final) == ["old"]


def test_a_directory_that_exists_is_replaced_whole(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for name in ("old", "new"):
        with new_directory(final) as scratch:
            (scratch / name).touch()
    assert names(final) == ["new"]
    assert names(tmp_path) == ["final"]


def test_writers_of_one_name_do_not_see_each_other(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with new_directory(final) as one:
        (one / "one").touch()
        with new_directory(final) as two:
            (two / "two").touch()
            assert names(two) == ["two"]
        assert names(final) == ["two"]
    assert names(final) == ["one"]


def test_a_file_is_replaced_whole_and_belongs_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_file_atomic(path, b"old")
    write_file_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(path.parent) == ["file"]


def test_a_file_that_cannot_be_finished_leaves_the_old_one(
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


def test_removing_takes_the_content_and_forgives_absence(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with new_directory(final) as scratch:
        (scratch / "file").touch()
    remove_directory(final)
    remove_directory(final)
    assert names(tmp_path) == []


def test_what_dead_writers_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / f"{SCRATCH_PREFIX}1" / "sub").mkdir(parents=True)
    (tmp_path / f"{SCRATCH_PREFIX}2").touch()
    (tmp_path / "kept").mkdir()
    assert remove_scratch(tmp_path) == 2
    assert names(tmp_path) == ["kept"]
