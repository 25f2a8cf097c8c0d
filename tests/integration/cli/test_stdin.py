"""S3-G19: a question that nobody answers is answered with no, and nothing is changed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from tests.integration.cli.conftest import Scene
from tests.integration.conftest import KEY

TINKEX = [sys.executable, "-m", "tinkex"]
#: Every command that asks before it changes something on a server.
ASKING = {"delete": "Delete 1 checkpoint?", "unpublish": "private?"}
#: Requests that change something.
CHANGES = ("delete_checkpoint", "unpublish_checkpoint")


def changes(scene: Scene) -> int:
    return sum(len(scene.server.calls(name)) for name in CHANGES)


def run_with(stdin: int | IO[Any] | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process; without a stdin it is closed."""
    command: Sequence[str] = [*TINKEX, *words]
    if stdin is None:
        # Not /dev/null: there is no file number 0 at all.
        command = ["bash", "-c", 'exec "$@" <&-', "bash", *command]
    return subprocess.run(
        command, stdin=stdin, capture_output=True, text=True, timeout=60, env=os.environ.copy()
    )


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.parametrize("kind", ["closed", "empty"])
def test_delete_without_an_answer_deletes_nothing(
    kind: str, flags: tuple[str, ...], scene: Scene
) -> None:
    stdin = None if kind == "closed" else subprocess.DEVNULL
    done = run_with(stdin, "checkpoint", "delete", scene.training, *flags)
    assert done.returncode == 1
    assert done.stderr.endswith("Delete 1 checkpoint? [y/N] \nCancelled.\n")
    assert bool(done.stdout) == bool(flags)
    assert changes(scene) == 0


@pytest.mark.parametrize("command", ASKING)
@pytest.mark.parametrize("typed", [b"\x04", b"\n", b"no\n", b"yeah\n"])
def test_only_a_yes_on_a_terminal_changes_anything(
    command: str, typed: bytes, scene: Scene
) -> None:
    person, terminal = pty.openpty()
    try:
        os.write(person, typed)
        with open(terminal, "rb", buffering=0, closefd=False) as stdin:
            done = run_with(stdin, "checkpoint", command, scene.training)
    finally:
        os.close(person)
        os.close(terminal)
    assert (done.returncode, done.stdout) == (1, "")
    assert ASKING[command] in done.stderr
    assert done.stderr.endswith("Cancelled.\n")
    assert "Traceback" not in done.stderr
    assert changes(scene) == 0


def test_a_piped_yes_deletes_and_the_questions_line_is_ended(scene: Scene, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    answer.write_text("y\n")
    with answer.open() as stdin:
        done = run_with(stdin, "checkpoint", "delete", scene.training)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("Delete 1 checkpoint? [y/N] \nDeleted 1 checkpoint.\n")
    assert changes(scene) == 1


@pytest.mark.parametrize("words", [("auth", "login"), ("auth", "login", "--api-key-stdin")])
@pytest.mark.parametrize("kind", ["closed", "empty"])
def test_a_login_without_a_key_stores_nothing(
    kind: str, words: tuple[str, ...], scene: Scene, tmp_path: Path
) -> None:
    stdin = None if kind == "closed" else subprocess.DEVNULL
    done = run_with(stdin, *words, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert '"error"' in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".tinkex" / "config.toml").exists()


@pytest.mark.parametrize("kind", ["closed", "empty"])
@pytest.mark.parametrize("option", ["--prompt", "--prompt-file", "--prompt-tokens"])
def test_a_prompt_that_never_comes_is_a_sentence(option: str, kind: str, scene: Scene) -> None:
    before = len(scene.server.sessions)
    stdin = None if kind == "closed" else subprocess.DEVNULL
    done = run_with(stdin, "sample", option, "-", "--api-key", KEY)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("Error: ") == 1
    assert "Unexpected" not in done.stderr
    assert len(scene.server.sessions) == before
