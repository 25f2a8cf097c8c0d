"""Help texts of arguments, and completion without heavy imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest

from tests.unit.cli.test_main import HEAVY
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


def complete(words: str, place: int) -> list[str]:
    """Return bash completions from a process that must not import heavy modules."""
    probe = (
        "import sys\n"
        "from tinkex.cli.main import main\n"
        "try:\n"
        "    main([])\n"
        "finally:\n"
        f"    loaded = {HEAVY!r} & set(sys.modules)\n"
        "    assert not loaded, loaded\n"
    )
    asked = {"_TINKEX_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=os.environ | asked
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_completion_avoids_heavy_imports() -> None:
    assert {"session", "serve"} <= set(complete("tinkex se", 1))
    assert complete("tinkex session ", 2) == ["export-trace", "finish", "info", "list"]
    assert complete("tinkex --json session list --st", 4) == ["--status"]
    assert complete("tinkex session list --status act", 4) == ["active"]
    assert complete("tinkex completion z", 2) == ["zsh"]
    assert "--base-url" in complete("tinkex auth login --", 3)


def test_completing_a_command_does_not_import_siblings() -> None:
    probe = (
        "import sys, click\n"
        "from tinkex.cli.main import main\n"
        "found = main.shell_complete(click.Context(main), '')\n"
        "assert {'session', 'doctor'} <= {item.value for item in found}\n"
        "assert all(item.help for item in found)\n"
        "loaded = [name for name in sys.modules if name.startswith('tinkex.cli.commands.')]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
