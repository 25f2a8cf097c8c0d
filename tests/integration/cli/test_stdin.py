"""Without an answer on stdin, confirmations are declined and nothing changes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from tests.integration.cli.conftest import SeededServer
from tests.integration.conftest import KEY

TINKEX = [sys.executable, "-m", "tinkex"]
#: Commands that ask for confirmation before changing something on a server.
ASKING = {"delete": "Delete 1 checkpoint?", "unpublish": "private?"}
#: Requests that change something.
CHANGES = ("delete_checkpoint", "unpublish_checkpoint")


@pytest.fixture
def seeded(shared_seeded: SeededServer) -> SeededServer:
    """Nothing here changes the server."""
    return shared_seeded


def num_changes(seeded: SeededServer) -> int:
    return sum(len(seeded.server.calls(name)) for name in CHANGES)


def run_with(stdin: int | IO[Any] | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process; stdin is closed unless given."""
    command: Sequence[str] = [*TINKEX, *words]
    if stdin is None:
        # Not /dev/null: file descriptor 0 does not exist.
        command = ["bash", "-c", 'exec "$@" <&-', "bash", *command]
    return subprocess.run(
        command, stdin=stdin, capture_output=True, text=True, timeout=60, env=os.environ.copy()
    )


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.parametrize("kind", ["closed", "empty"])
def test_delete_without_an_answer_deletes_nothing(
    kind: str, flags: tuple[str, ...], seeded: SeededServer
) -> None:
    stdin = None if kind == "closed" else subprocess.DEVNULL
    result = run_with(stdin, "checkpoint", "delete", seeded.training, *flags)
    assert result.returncode == 1
    assert result.stderr.endswith("Delete 1 checkpoint? [y/N] \nCancelled.\n")
    assert bool(result.stdout) == bool(flags)
    assert num_changes(seeded) == 0


@pytest.mark.parametrize("command", ASKING)
@pytest.mark.parametrize("typed", [b"\x04", b"\n", b"no\n", b"yeah\n"])
def test_only_yes_on_a_terminal_confirms(command: str, typed: bytes, seeded: SeededServer) -> None:
    person, terminal = pty.openpty()
    try:
        os.write(person, typed)
        with open(terminal, "rb", buffering=0, closefd=False) as stdin:
            result = run_with(stdin, "checkpoint", command, seeded.training)
    finally:
        os.close(person)
        os.close(terminal)
    assert (result.returncode, result.stdout) == (1, "")
    assert ASKING[command] in result.stderr
    assert result.stderr.endswith("Cancelled.\n")
    assert "Traceback" not in result.stderr
    assert num_changes(seeded) == 0


def test_piped_yes_confirms_and_ends_the_prompt_line(
    own_seeded: SeededServer, tmp_path: Path
) -> None:
    answer = tmp_path / "answer"
    answer.write_text("y\n")
    with answer.open() as stdin:
        result = run_with(stdin, "checkpoint", "delete", own_seeded.training)
    assert result.returncode == 0, result.stderr
    assert result.stderr.endswith("Delete 1 checkpoint? [y/N] \nDeleted 1 checkpoint.\n")
    assert num_changes(own_seeded) == 1


@pytest.mark.parametrize("words", [("auth", "login"), ("auth", "login", "--api-key-stdin")])
@pytest.mark.parametrize("kind", ["closed", "empty"])
def test_a_login_without_a_key_stores_nothing(
    kind: str, words: tuple[str, ...], seeded: SeededServer, tmp_path: Path
) -> None:
    stdin = None if kind == "closed" else subprocess.DEVNULL
    result = run_with(stdin, *words, "--json")
    assert (result.returncode, result.stdout) == (1, "")
    assert '"error"' in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / ".tinkex" / "config.toml").exists()


@pytest.mark.parametrize("kind", ["closed", "empty"])
@pytest.mark.parametrize("option", ["--prompt", "--prompt-file", "--prompt-tokens"])
def test_missing_prompt_on_stdin_is_an_error(option: str, kind: str, seeded: SeededServer) -> None:
    before = len(seeded.server.sessions)
    stdin = None if kind == "closed" else subprocess.DEVNULL
    result = run_with(stdin, "sample", option, "-", "--api-key", KEY)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("Error: ") == 1
    assert "Unexpected" not in result.stderr
    assert len(seeded.server.sessions) == before
