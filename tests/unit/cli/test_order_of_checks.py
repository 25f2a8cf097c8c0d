"""Local checks run before any request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tinkex.cli.context import Context
from tinkex.cli.main import run

ROW = {"prompt": "a", "completion": "b"}


def refuse(*_: object, **__: object) -> Any:
    raise AssertionError("a client was made")


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    outcome = run(words, Context(make_service=refuse))
    assert outcome.exit_code in {1, 2}
    said: str = capsys.readouterr().err
    assert "a client was made" not in said
    return said


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    return tmp_path / "rows.jsonl"


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_missing_data_file_is_reported_first(
    recipe: str, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fails(capsys, "train", recipe, "absent.jsonl")
    assert said.startswith("Error: absent.jsonl cannot be read: No such file or directory\n")
    assert list(rows.parent.iterdir()) == [rows]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no rows"),
        ('{"prompt": "a"\n', "line 1 is not JSON"),
        ('{"prompt": "a"}\n', "line 1: no field 'completion'"),
    ],
)
def test_bad_rows(content: str, said: str, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows.write_text(content)
    assert said in fails(capsys, "train", "sft", "rows.jsonl")
    assert list(rows.parent.iterdir()) == [rows]


def test_missing_evaluation_file_is_reported_first(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "sft", "rows.jsonl", "--eval", "absent.jsonl")
    assert "absent.jsonl cannot be read" in fails(capsys, *words)


def test_missing_reward_function_is_reported_first(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "rl", "rows.jsonl", "--reward", "absent.py:score")
    assert "absent.py cannot be read" in fails(capsys, *words)


def test_unusable_run_directory(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", "sft", "rows.jsonl", "--run-dir", "rows.jsonl/run")
    said = fails(capsys, *words)
    assert "rows.jsonl is not a directory that this user can write to" in said
    assert "--run-dir" in said


def test_missing_prompt_file_is_reported_first(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "absent.txt" in fails(capsys, "sample", "--prompt-file", "absent.txt")


@pytest.mark.parametrize("words", [("run", "list"), ("checkpoint", "list"), ("session", "list")])
def test_list_of_new_home_does_not_start_server(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKEX_API_KEY", "TINKEX_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tinkex.client.local_server.ensure_server", refuse)
    assert run([*words, "--json"], Context()).exit_code == 0
    listed = json.loads(capsys.readouterr().out)
    assert [] in listed.values()
    assert not (tmp_path / "home").exists()
    # With existing data, only the server can answer.
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "store.db").touch()
    assert run(words, Context()).exit_code == 1
    assert "a client was made" in capsys.readouterr().err


def test_invalid_option_is_reported_first(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "learning_rate" in fails(capsys, "train", "sft", "rows.jsonl", "--learning-rate", "-1")
