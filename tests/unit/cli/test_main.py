"""The command line itself: help without imports, errors as sentences, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tinkex.cli.errors import ReportingGroup
from tinkex.cli.lazy import Entry
from tinkex.cli.main import COMMANDS, main
from tinkex.errors import ConfigError


def test_help_lists_every_command_with_its_own_summary() -> None:
    shown = CliRunner().invoke(main, ["--help"])
    assert shown.exit_code == 0
    for name, entry in COMMANDS.items():
        assert f"{name} " in shown.output
        assert entry.summary in shown.output


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_exists_and_its_summary_is_its_own_first_sentence(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name
    first = (command.help or "").strip().partition("\n")[0].rstrip(".")
    assert first.startswith(COMMANDS[name].summary.rstrip("."))


def test_an_unknown_command_is_named() -> None:
    refused = CliRunner().invoke(main, ["sreve"])
    assert refused.exit_code == 2
    assert "sreve" in refused.output


def test_the_version_as_text_and_json() -> None:
    text = CliRunner().invoke(main, ["version"]).output
    found = json.loads(CliRunner().invoke(main, ["version", "--json"]).output)
    assert text == f"tinkex {found['version']}\n"
    assert found["python"].startswith("3.")


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    probe = (
        "import sys\n"
        "from tinkex.cli.main import main\n"
        f"main({words!r}, standalone_mode=False)\n"
        "heavy = {'sqlalchemy', 'litestar', 'uvicorn', 'numpy', 'torch', 'rich', 'pyqwest'}\n"
        "sys.exit(','.join(heavy & set(sys.modules)) or None)\n"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (run.returncode, run.stderr.strip()) == (0, "")
    assert "Usage:" in run.stdout


@click.group(cls=ReportingGroup, entries={"far": Entry("tests.unit.cli.test_main:far", "Far.")})
def group() -> None:
    """A group to fail in."""


@group.command()
def refuse() -> None:
    """Fail with a sentence."""
    raise ConfigError("the port is 'x'", hint="Pass a number.")


@group.command()
def interrupt() -> None:
    """Be stopped by Ctrl-C."""
    raise KeyboardInterrupt


@group.command()
def crash() -> None:
    """Fail with a mistake of ours."""
    raise RuntimeError("a mistake")


@click.command()
def far() -> None:
    """A command in another module."""
    click.echo("far away")


def test_an_error_of_ours_is_a_sentence_and_exit_code_1() -> None:
    shown = CliRunner().invoke(group, ["refuse"])
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr == "Error: the port is 'x'\nPass a number.\n"


def test_ctrl_c_has_the_exit_code_of_shells() -> None:
    assert CliRunner().invoke(group, ["interrupt"]).exit_code == 130


def test_a_file_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (["serve", "status"], ["serve", "stop"], ["key", "list"], ["serve"]):
        shown = CliRunner().invoke(main, [*words, "--home", str(tmp_path / "file" / "home")])
        assert (shown.exit_code, shown.stdout) == (1, "")
        assert shown.stderr.startswith("Error: ")
        assert str(tmp_path / "file" / "home") in shown.stderr
        assert "Not a directory" in shown.stderr


def test_a_name_that_is_too_long_for_a_home_is_a_sentence(tmp_path: Path) -> None:
    for words in (["serve", "status"], ["serve"]):
        shown = CliRunner().invoke(main, [*words, "--home", str(tmp_path / ("x" * 300))])
        assert (shown.exit_code, shown.stdout) == (1, "")
        assert "cannot be used: File name too long\nMake it" in shown.stderr


@pytest.mark.parametrize("words", [["serve"], ["serve", "status"], ["key", "list"]])
def test_an_empty_home_is_not_the_directory_of_the_shell(words: list[str]) -> None:
    shown = CliRunner().invoke(main, [*words, "--home", ""])
    assert shown.exit_code == 2
    assert "'--home': the name is empty; name a directory" in shown.stderr


def test_a_mistake_of_ours_stays_a_traceback() -> None:
    assert isinstance(CliRunner().invoke(group, ["crash"]).exception, RuntimeError)


def test_a_command_of_another_module_is_imported_when_called() -> None:
    assert CliRunner().invoke(group, ["far"]).output == "far away\n"
