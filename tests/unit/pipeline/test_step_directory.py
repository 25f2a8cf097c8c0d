from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinkex.checkpoint.manifest import write_manifest
from tinkex.checkpoint.retention import StepRetention
from tinkex.pipeline.checkpoints.step_directory import (
    PIN_FILE,
    REPLACED_PREFIX,
    REQUIRED_FILES,
    archive_later_steps,
    find_step_problem,
    is_valid_step,
    latest_step,
    list_steps,
    prune_steps,
    recover_replaced_steps,
    remove_interrupted_saves,
    step_name,
    step_number,
    write_latest,
)
from tinkex.system.atomic import SCRATCH_PREFIX


def make(root: Path, step: int, *, has_manifest: bool = True) -> Path:
    path = root / step_name(step)
    path.mkdir(parents=True)
    for name in REQUIRED_FILES:
        (path / name).write_text("content")
    if has_manifest:
        write_manifest(path)
    return path


def test_step_names_have_eight_digits() -> None:
    assert step_name(123) == "step_00000123"
    assert step_number(Path("step_00000123")) == 123
    assert step_number(Path("step_123456789")) == 123456789
    for name in ("step_", "step_1x", "xstep_1", "step_-1", "step_0000001.tmp"):
        assert step_number(Path(name)) is None


@pytest.mark.parametrize("name", REQUIRED_FILES)
def test_missing_or_empty_file_is_reported(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, 1, has_manifest=False)
    assert is_valid_step(path)
    (path / name).write_text("")
    assert find_step_problem(path) == f"{name} is empty"
    (path / name).unlink()
    assert find_step_problem(path) == f"{name} is missing"


def test_only_digest_verification_finds_a_changed_byte(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    (path / "model.pth").write_text("CONTENT")
    assert find_step_problem(path) is None
    assert "damaged" in str(find_step_problem(path, verify_digests=True))


def test_broken_manifest_and_missing_file_are_reported(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    (path / "manifest.json").write_text("{")
    assert not is_valid_step(path)
    other = make(tmp_path, 2)
    (other / "rng.pt").write_text("x")
    write_manifest(other)
    (other / "rng.pt").unlink()
    assert "rng.pt" in str(find_step_problem(other))


def test_file_named_like_a_step_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").write_text("x")
    assert list(list_steps(tmp_path)) == []
    assert latest_step(tmp_path) is None


def test_prune_removes_old_and_broken_steps_below_the_newest_valid_one(
    tmp_path: Path,
) -> None:
    for step in (1, 2, 3, 5, 6):
        make(tmp_path, step)
    (tmp_path / step_name(4)).mkdir()
    (tmp_path / step_name(7)).mkdir()
    (tmp_path / step_name(1) / PIN_FILE).touch()
    (tmp_path / "notes").mkdir()
    prune_steps(tmp_path, StepRetention(keep_last=2), best=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes", *(step_name(step) for step in (1, 3, 5, 6, 7))]


def test_prune_keeps_everything_without_a_valid_step(tmp_path: Path) -> None:
    (tmp_path / step_name(4)).mkdir()
    assert prune_steps(tmp_path, StepRetention(keep_last=1)) == []


def test_prune_ignores_steps_after_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9):
        make(tmp_path, step)
    prune_steps(tmp_path, StepRetention(keep_last=2), newest=3)
    assert [step for step, _ in list_steps(tmp_path)] == [9, 3, 2]


def test_archive_later_steps_moves_valid_steps(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        make(tmp_path, step)
    (tmp_path / step_name(9)).mkdir()
    assert archive_later_steps(tmp_path, 4) == tmp_path / "abandoned_1"
    assert latest_step(tmp_path) == tmp_path / step_name(4)
    assert [step for step, _ in list_steps(tmp_path / "abandoned_1")] == [8, 6]
    assert archive_later_steps(tmp_path, 4) is None
    make(tmp_path, 5)
    assert archive_later_steps(tmp_path, 4) == tmp_path / "abandoned_2"


def test_prune_leaves_scratch_directories(tmp_path: Path) -> None:
    make(tmp_path, 1)
    scratch = tmp_path / f"{SCRATCH_PREFIX}being-written"
    scratch.mkdir()
    # A clock jump can make a directory that is being written look old.
    os.utime(scratch, (1.0, 1.0))
    prune_steps(tmp_path, StepRetention(keep_last=1))
    assert scratch.is_dir()
    assert remove_interrupted_saves(tmp_path) == 1
    assert not scratch.exists()


def test_interrupted_replacement_is_recovered(
    tmp_path: Path,
) -> None:
    path = make(tmp_path, 3)
    aside = path.rename(tmp_path / f"{REPLACED_PREFIX}{path.name}")
    assert latest_step(tmp_path) is None
    assert aside.is_dir(), "a look renames nothing"
    recover_replaced_steps(tmp_path)
    assert latest_step(tmp_path) == path
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_interrupted_saves_are_removed(tmp_path: Path) -> None:
    path = make(tmp_path, 3)
    (tmp_path / f"{REPLACED_PREFIX}{path.name}").mkdir()
    (tmp_path / f"{SCRATCH_PREFIX}1").mkdir()
    assert remove_interrupted_saves(tmp_path) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert remove_interrupted_saves(tmp_path / "none") == 0


def test_latest_is_a_file(tmp_path: Path) -> None:
    write_latest(tmp_path, make(tmp_path, 3))
    assert (tmp_path / "latest").read_text() == "step_00000003\n"
    assert not (tmp_path / "latest").is_symlink()
