"""Detection of terminals and pipes, NO_COLOR and COLUMNS."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from tinkex.cli.context import Context, Screen
from tinkex.settings import TerminalSettings, read_terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """A terminal with 97 columns, without environment variables."""
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 97, 0, 0))
    with os.fdopen(slave, "w") as stream:
        yield stream
    os.close(master)


def detect_context(stream: TextIO | None, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Detect the context of a process with these streams."""
    with monkeypatch.context() as patch:
        for name in ("stdin", "stdout", "stderr"):
            patch.setattr(sys, name, stream)
        return Context.detect()


def test_terminal_has_colors_and_width(terminal: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    found = detect_context(terminal, monkeypatch)
    assert found.stdout == Screen(is_terminal=True, is_colored=True, width=97)
    assert found.stderr == found.stdout
    assert found.is_stdin_terminal


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_environment_variable_disables_colors(
    name: str, value: str, terminal: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert detect_context(terminal, monkeypatch).stdout == Screen(
        is_terminal=True, is_colored=False, width=97
    )


def test_columns_variable_overrides_width(
    terminal: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert detect_context(terminal, monkeypatch).stdout.width == 50


def test_pipe_has_no_colors_and_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    closed = io.StringIO()
    closed.close()
    for stream in (io.StringIO(), closed, None):
        found = detect_context(stream, monkeypatch)
        assert (found.stdout, found.stderr) == (Screen(), Screen())
        assert not found.is_stdin_terminal


@pytest.mark.parametrize("columns", ["", "0", "-3", "x", "3.5"])
def test_invalid_columns_variable_is_ignored(columns: str) -> None:
    assert read_terminal({"COLUMNS": columns, "NO_COLOR": ""}) == TerminalSettings()
