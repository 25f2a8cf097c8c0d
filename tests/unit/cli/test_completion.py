"""Completion of ids: candidates from the server, never an error."""

from __future__ import annotations

import threading
from pathlib import Path

import click
import pytest

from tinkex.cli import id_arguments
from tinkex.cli.context import Context
from tinkex.cli.id_arguments import RUN, within_deadline


def test_only_candidates_before_the_deadline_are_returned() -> None:
    held = threading.Event()
    try:
        assert within_deadline(lambda: [("a", "b")], 30.0) == [("a", "b")]
        assert within_deadline(lambda: [("a", "b")] if held.wait(30.0) else (), 0.01) == ()
    finally:
        held.set()


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(3), KeyboardInterrupt()])
def test_error_returns_no_candidates(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[tuple[str, str]]:
        raise error

    assert within_deadline(fail, 30.0) == ()
    assert capsys.readouterr() == ("", "")


def test_completion_does_not_start_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("TINKEX_HOME", str(home))
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKEX_API_KEY", "TINKEX_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(id_arguments, "DEADLINE_SECONDS", 30.0)
    ctx = click.Context(click.Command("info"), obj=Context())

    assert RUN.shell_complete(ctx, click.Argument(["run_id"]), "") == []
    assert not home.exists()
