from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.errors import InvalidInput
from tinkex.recipes.journal import Journal, Progress

SAVED = Progress(step=4, state_path="tinker://r/weights/x-000004", reference_path="tinker://ref")


def begun(directory: Path, **essence: object) -> Journal:
    journal = Journal(directory)
    directory.mkdir(exist_ok=True)
    journal.adopt({"note": "all settings"}, essence)
    return journal


def test_progress_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.progress() is None
    journal.save(SAVED)
    assert Journal(tmp_path).progress() == SAVED
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_a_damaged_progress_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text('{"step": 3')
    with pytest.raises(InvalidInput, match=r"progress\.json cannot be read") as caught:
        Journal(tmp_path).progress()
    assert "--restart" in str(caught.value.hint)


def test_changes_count_only_once_something_was_saved(tmp_path: Path) -> None:
    journal = begun(tmp_path, seed=1, rank=8)
    assert journal.changes({"seed": 2, "rank": 8}) == []
    journal.save(SAVED)
    assert journal.changes({"seed": 1, "rank": 8}) == []
    assert journal.changes({"seed": 2, "rank": 8}) == ["seed was 1 and is 2"]
    assert journal.changes({"seed": 1}) == ["rank was 8 and is None"]


def test_a_restart_forgets_progress_and_metrics(tmp_path: Path) -> None:
    journal = begun(tmp_path, seed=1)
    journal.save(SAVED)
    journal.measure({"step": 1})
    journal.restart()
    assert (journal.progress(), journal.rows()) == (None, [])
    journal.restart()


def test_metrics_after_the_saved_step_are_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.rewind(3)
    assert not journal.metrics_file.exists()
    for step in (1, 2, 3, 4, 5):
        journal.measure({"step": step, "loss": 1.0 / step})
    journal.rewind(3)
    assert [row["step"] for row in journal.rows()] == [1, 2, 3]


def test_a_line_that_a_dying_process_left_half_is_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.measure({"step": 1})
    with journal.metrics_file.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert [row["step"] for row in journal.rows()] == [1]
    journal.rewind(5)
    journal.measure({"step": 2})
    assert [row["step"] for row in journal.rows()] == [1, 2]


def test_two_processes_cannot_train_in_one_directory(tmp_path: Path) -> None:
    with (
        Journal(tmp_path).held(),
        pytest.raises(InvalidInput, match="another process"),
        Journal(tmp_path).held(),
    ):
        pass
    with Journal(tmp_path).held():
        pass


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be used"), Journal(tmp_path / "file").held():
        pass


class Unlucky(Exception):
    """A run that fails."""


def test_a_run_that_fails_before_its_first_step_leaves_no_directory(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs" / "sft")
    with pytest.raises(Unlucky), journal.held():
        journal.adopt({}, {})
        raise Unlucky
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_later_keeps_its_directory(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    with pytest.raises(Unlucky), journal.held():
        journal.measure({"step": 1})
        raise Unlucky
    assert journal.rows() == [{"step": 1}]


def test_a_directory_that_was_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(Unlucky), Journal(tmp_path).held():
        raise Unlucky
    assert (tmp_path / "notes.txt").exists()
