"""Help texts of arguments, and completion without heavy imports."""

from __future__ import annotations

import json

import click
import pytest

from tinkex.cli.main import run
from tinkex.cli.options import Argument, Command


def help_of(command: click.Command) -> str:
    return command.get_help(click.Context(command, info_name="c"))


def test_argument_with_summary_has_a_help_section() -> None:
    @click.command(cls=Command)
    @click.argument("path", cls=Argument, summary="Where it goes.")
    @click.option("--much", help="How much.")
    def save(path: str, much: str) -> None:
        """Save."""

    shown = help_of(save)
    assert "Arguments:\n  PATH  Where it goes.\n\nOptions:\n  --much TEXT  How much.\n" in shown
    assert shown.count("PATH") == 2


def test_argument_without_summary_is_only_in_usage() -> None:
    @click.command(cls=Command)
    @click.argument("path")
    @click.option("--much", help="How much.")
    def save(path: str, much: str) -> None:
        """Save."""

    shown = help_of(save)
    assert "Usage: c [OPTIONS] PATH" in shown
    assert shown.count("PATH") == 1
    assert "Arguments:" not in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_contains_variable_and_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", shell]).exit_code == 0
    script = capsys.readouterr().out
    assert f"_TINKEX_COMPLETE={shell}_complete" in script
    assert "_tinkex_completion" in script
    assert run(["completion", shell, "--json"]).exit_code == 0
    assert json.loads(capsys.readouterr().out) == {"shell": shell, "script": script}


def test_unsupported_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "csh"]).exit_code == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
