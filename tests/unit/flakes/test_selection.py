"""Which tests `make flaky` repeats, and how it reads their outcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flakes import selection
from tests.flakes.__main__ import failures_in, is_busy_round
from tests.flakes.selection import process_tests


@pytest.mark.parametrize(
    "file",
    [
        # By its own text, by a module that it imports, and by the conftest of its directory.
        "tests/integration/cli/test_chat_terminal.py",
        "tests/integration/test_full_disk.py",
        "tests/acceptance/processes/test_process_crashes.py",
        "tests/acceptance/server/test_older_sdks.py",
        "tests/integration/store/test_jobs.py",
    ],
)
def test_files_that_start_processes_are_selected(file: str) -> None:
    assert process_tests([file]) == [file]


def test_files_that_start_no_process_are_not() -> None:
    assert process_tests(["tests/integration/test_polling.py"]) == []


def test_a_sign_in_an_imported_module_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    folder = tmp_path / "tests" / "ring"
    folder.mkdir(parents=True)
    (folder / "helper.py").write_text("import subprocess\n")
    (folder / "between.py").write_text("from tests.ring import helper\n")
    (folder / "test_one.py").write_text("from tests.ring.between import helper\n")
    (folder / "test_two.py").write_text("from tests.ring import absent\n")
    assert process_tests(["tests/ring"]) == ["tests/ring/test_one.py"]


def test_every_third_round_is_busy() -> None:
    assert [number for number in range(1, 10) if is_busy_round(number)] == [3, 6, 9]


def test_failures_are_read_from_the_summary() -> None:
    text = """
E   ERROR is a word of a log
FAILED tests/a.py::test_one[x] - assert 1 == 2
ERROR tests/a.py::test_two - OSError
ERROR tests/a.py::test_two - OSError
1 failed, 2 passed
"""
    assert failures_in(text) == ["tests/a.py::test_one[x]", "tests/a.py::test_two"]
