"""The root command: help without heavy imports, errors and exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tinkex.cli.context import Context
from tinkex.cli.lazy import LazyGroup
from tinkex.cli.main import COMMANDS, main, run
from tinkex.cli.options import Command, Group


def all_commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Return every command by its path."""
    waiting: list[tuple[tuple[str, ...], click.Command]] = [((), main)]
    while waiting:
        words, command = waiting.pop()
        yield words, command
        if isinstance(command, click.Group):
            ctx = click.Context(command, help_option_names=["-h", "--help"])
            for name in command.list_commands(ctx):
                child = command.get_command(ctx, name)
                assert child is not None
                waiting.append(((*words, name), child))


ALL = dict(all_commands())


def test_help_lists_every_command_with_its_own_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]).exit_code == 0
    shown = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"{name} " in shown
        assert entry.summary in shown


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_lazy_summary_equals_first_sentence_of_help(
    words: tuple[str, ...],
) -> None:
    command = ALL[words]
    assert isinstance(command, Command | Group)
    if not words:
        return
    parent = ALL[words[:-1]]
    assert isinstance(parent, click.Group)
    assert command.name == words[-1] or words[0] == "sample"
    entries = parent.entries if isinstance(parent, LazyGroup) else {}
    if words[-1] in entries:
        first = (command.help or "").strip().partition("\n")[0].rstrip(".")
        assert first.startswith(entries[words[-1]].summary.rstrip("."))


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_help_lists_global_options(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("-h", "--help"):
        assert run([*words, flag]).exit_code == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"Usage: tinkex {' '.join(words)}".rstrip())
        for option in ("--format", "--base-url", "--profile", "--timeout", "-v, --verbose"):
            assert option in shown


def test_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sreve"]).exit_code == 2
    assert "sreve" in capsys.readouterr().err


def test_no_command_is_a_usage_error_that_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]).exit_code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Commands:" in told.err


# --- outcomes ---------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Make `tinkex version` raise the errors in this list."""
    errors: list[BaseException] = []

    def fail(self: click.Command, ctx: click.Context) -> None:
        raise errors[0]

    monkeypatch.setattr(type(ALL[("version",)]), "invoke", fail)
    return errors


def test_ctrl_c_has_the_exit_code_of_shells(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(KeyboardInterrupt())
    outcome = run(["version"])
    assert (outcome.exit_code, type(outcome.error)) == (130, KeyboardInterrupt)
    assert capsys.readouterr().err == "Interrupted.\n"


def test_broken_pipe_prints_no_error(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(BrokenPipeError(32, "Broken pipe"))
    assert run(["version"]).exit_code == 1
    assert capsys.readouterr().err == ""


def test_a_traceback_is_shown_only_with_verbose(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(RuntimeError("a mistake"))
    assert run(["version"]).exit_code == 1
    told = capsys.readouterr().err
    assert told.startswith("Error: Unexpected error: RuntimeError: a mistake\n")
    assert "--verbose" in told
    assert "Traceback" not in told
    for words in (["version", "-v"], ["--verbose", "version"]):
        assert run(words).exit_code == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_errors_are_json_with_json_format(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(RuntimeError("a mistake"))
    for words in (["version", "--json"], ["-f", "json", "version"], ["version", "-fjson"]):
        assert run(words).exit_code == 1
        told = capsys.readouterr()
        assert told.out == ""
        assert json.loads(told.err)["error"]["type"] == "RuntimeError"


@pytest.mark.parametrize(
    "words", [["nosuch"], ["run", "nosuch"], ["run", "info"], ["version", "--nosuch"], ["-x"]]
)
def test_usage_errors_are_json_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--json"], ["-f", "json"], ["--format=json"]):
        assert run([*words, *flags]).exit_code == 2
        told = capsys.readouterr()
        found = json.loads(told.err)["error"]
        assert (told.out, found["category"]) == ("", "user")
        assert "--help" in found["hint"]


def test_main_exits_with_the_exit_code() -> None:
    for words, code in ((["version"], 0), (["nosuch"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == code


def test_commands_get_the_injected_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"], Context(format="json")).exit_code == 0
    assert set(json.loads(capsys.readouterr().out)) == {"version", "commit"}


# --- homes ------------------------------------------------------------------------------------


def test_unusable_file_error_has_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (["serve", "status"], ["serve", "stop"], ["key", "list"], ["serve"]):
        shown = CliRunner().invoke(main, [*words, "--home", str(tmp_path / "file" / "home")])
        assert (shown.exit_code, shown.stdout) == (1, "")
        assert shown.stderr.startswith("Error: ")
        assert str(tmp_path / "file" / "home") in shown.stderr
        assert "Not a directory" in shown.stderr


def test_too_long_home_path_is_an_error(tmp_path: Path) -> None:
    for words in (["serve", "status"], ["serve"]):
        shown = CliRunner().invoke(main, [*words, "--home", str(tmp_path / ("x" * 300))])
        assert (shown.exit_code, shown.stdout) == (1, "")
        assert "cannot be used: File name too long\nMake it" in shown.stderr


@pytest.mark.parametrize("words", [["serve"], ["serve", "status"], ["key", "list"]])
def test_empty_home_is_rejected(words: list[str]) -> None:
    shown = CliRunner().invoke(main, [*words, "--home", ""])
    assert shown.exit_code == 2
    assert "'--home': the name is empty; give a directory" in shown.stderr
