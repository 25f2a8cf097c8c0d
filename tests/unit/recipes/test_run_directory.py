from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.errors import InvalidInput
from tinkex.recipes.run_directory import RunDirectory, SavedProgress

SAVED = SavedProgress(
    step=4, state_path="tinker://r/weights/x-000004", reference_path="tinker://ref"
)


def begun(directory: Path, **essence: object) -> RunDirectory:
    run_directory = RunDirectory(directory)
    directory.mkdir(exist_ok=True)
    run_directory.write_plan({"note": "all settings"}, essence)
    return run_directory


def test_progress_round_trips(tmp_path: Path) -> None:
    run_directory = RunDirectory(tmp_path)
    assert run_directory.read_progress() is None
    run_directory.write_progress(SAVED)
    assert RunDirectory(tmp_path).read_progress() == SAVED
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_damaged_progress_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text('{"step": 3')
    with pytest.raises(InvalidInput, match=r"progress\.json cannot be read") as caught:
        RunDirectory(tmp_path).read_progress()
    assert "--restart" in str(caught.value.hint)


def test_changes_count_only_after_a_save(tmp_path: Path) -> None:
    run_directory = begun(tmp_path, seed=1, rank=8)
    assert run_directory.find_changes({"seed": 2, "rank": 8}) == []
    run_directory.write_progress(SAVED)
    assert run_directory.find_changes({"seed": 1, "rank": 8}) == []
    assert run_directory.find_changes({"seed": 2, "rank": 8}) == ["seed was 1 and is 2"]
    assert run_directory.find_changes({"seed": 1}) == ["rank was 8 and is None"]


def test_clear_progress_removes_progress_and_metrics(tmp_path: Path) -> None:
    run_directory = begun(tmp_path, seed=1)
    run_directory.write_progress(SAVED)
    run_directory.append_metrics({"step": 1})
    run_directory.clear_progress()
    assert (run_directory.read_progress(), run_directory.read_metrics()) == (None, [])
    run_directory.clear_progress()


def test_truncate_metrics_drops_later_steps(tmp_path: Path) -> None:
    run_directory = RunDirectory(tmp_path)
    run_directory.truncate_metrics(3)
    assert not run_directory.metrics_file.exists()
    for step in (1, 2, 3, 4, 5):
        run_directory.append_metrics({"step": step, "loss": 1.0 / step})
    run_directory.truncate_metrics(3)
    assert [row["step"] for row in run_directory.read_metrics()] == [1, 2, 3]


def test_truncated_metrics_line_is_dropped(tmp_path: Path) -> None:
    run_directory = RunDirectory(tmp_path)
    run_directory.append_metrics({"step": 1})
    with run_directory.metrics_file.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert [row["step"] for row in run_directory.read_metrics()] == [1]
    run_directory.truncate_metrics(5)
    run_directory.append_metrics({"step": 2})
    assert [row["step"] for row in run_directory.read_metrics()] == [1, 2]


def test_two_processes_cannot_train_in_one_directory(tmp_path: Path) -> None:
    with (
        RunDirectory(tmp_path).lock(),
        pytest.raises(InvalidInput, match="another process"),
        RunDirectory(tmp_path).lock(),
    ):
        pass
    with RunDirectory(tmp_path).lock():
        pass


def test_unusable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InvalidInput, match="cannot be used"),
        RunDirectory(tmp_path / "file").lock(),
    ):
        pass


class Unlucky(Exception):
    """A run that fails."""


def test_failure_before_the_first_step_removes_the_directory(tmp_path: Path) -> None:
    run_directory = RunDirectory(tmp_path / "runs" / "sft")
    with pytest.raises(Unlucky), run_directory.lock():
        run_directory.write_plan({}, {})
        raise Unlucky
    assert list(tmp_path.iterdir()) == []


def test_later_failure_keeps_the_directory(tmp_path: Path) -> None:
    run_directory = RunDirectory(tmp_path / "run")
    with pytest.raises(Unlucky), run_directory.lock():
        run_directory.append_metrics({"step": 1})
        raise Unlucky
    assert run_directory.read_metrics() == [{"step": 1}]


def test_existing_directory_is_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(Unlucky), RunDirectory(tmp_path).lock():
        raise Unlucky
    assert (tmp_path / "notes.txt").exists()
