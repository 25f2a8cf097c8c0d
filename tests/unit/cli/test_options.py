"""Global options at any position, lazy groups and default commands."""

from __future__ import annotations

import contextlib
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.context import Context, get_context, pass_context
from tinkex.cli.lazy import DefaultGroup, LazyCommand, LazyGroup, first_argument_index
from tinkex.cli.main import main, run
from tinkex.cli.options import Duration, Group, scan_output_flags

SEEN: list[Any] = []


@click.group(cls=Group)
def group() -> None:
    """A group."""


@group.group("inner")
def inner() -> None:
    """A group in a group."""


@inner.command()
@click.option("--own")
@pass_context
def look(context: Context, own: str | None) -> None:
    """Record the context."""
    SEEN.append(context)


@group.command()
@click.option("-f", "--api-key", "own")
@pass_context
def owner(context: Context, own: str | None) -> None:
    """A command with options of the same name."""
    SEEN.append((context, own))


def seen(*words: str, base: Context | None = None) -> Any:
    SEEN.clear()
    group.main(list(words), standalone_mode=False, obj=base or Context())
    return SEEN[0]


GIVEN = ("-f", "json", "-v", "--api-key", "tml-k", "--base-url", "http://h", "--profile", "p")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_global_options_work_at_any_position(place: int) -> None:
    words = ["inner", "look"]
    words[place:place] = [*GIVEN, "--timeout", "2m"]
    found = seen(*words)
    assert found == Context(
        format="json",
        verbose=True,
        api_key="tml-k",
        base_url="http://h",
        profile="p",
        timeout_seconds=120.0,
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-f json inner look -f table", "table"),
        ("-f table inner -f json look", "json"),
        ("inner look -f table --json", "json"),
        ("inner look --json --format=table", "table"),
        ("--json inner look", "json"),
        ("inner look", "table"),
    ],
)
def test_last_global_option_wins(words: str, expected: str) -> None:
    assert seen(*words.split()).format == expected


def test_options_not_given_keep_context_values() -> None:
    base = Context(format="json", base_url="http://base", api_key="tml-base")
    found = seen("inner", "look", "--base-url", "http://flag", base=base)
    assert (found.format, found.base_url, found.api_key) == ("json", "http://flag", "tml-base")


def test_own_option_overrides_global_flag() -> None:
    context, own = seen("owner", "--api-key", "mine", "--format", "json")
    assert (context.api_key, context.format, own) == (None, "json", "mine")
    context, own = seen("--api-key", "tml-k", "-f", "json", "owner", "-f", "mine")
    assert (context.api_key, context.format, own) == ("tml-k", "json", "mine")


def test_invalid_format_is_rejected() -> None:
    with pytest.raises(click.BadParameter, match="xml"):
        seen("inner", "look", "-f", "xml")


def test_context_repr_hides_key() -> None:
    assert "secret" not in repr(Context(api_key="tml-secret"))


def test_context_is_detected_by_default() -> None:
    with click.Context(group, help_option_names=["-h", "--help"]) as ctx:
        assert get_context(ctx).format == "table"


# --- durations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("500ms", 0.5), ("2m", 120), ("1h", 3600), ("30000", 30), ("1.5 s", 1.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "-1", "-1s", "x", "1d", "nan", "inf", "1e400", "0ms"])
def test_invalid_durations_are_rejected(text: str) -> None:
    with pytest.raises(click.BadParameter, match="30s, 500ms or 2m"):
        Duration().convert(text, None, None)


@given(st.text())
def test_any_text_parses_or_is_rejected(text: str) -> None:
    with contextlib.suppress(click.BadParameter):
        assert Duration().convert(text, None, None) > 0


# --- words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run list", {}),
        ("run list --json", {"format": "json"}),
        ("-f json nosuch", {"format": "json"}),
        ("-fjson x", {"format": "json"}),
        ("--format=json x -f table", {"format": "table"}),
        ("x -v", {"verbose": True}),
        ("x -f", {}),
        ("x --json -foo -f xml", {"format": "json"}),
        ("x json -- --json -v", {}),
        ("", {}),
    ],
)
def test_scan_output_flags(words: str, expected: dict[str, Any]) -> None:
    assert scan_output_flags(words.split()) == expected


@given(st.lists(st.sampled_from(["-f", "json", "--json", "-v", "--", "--prompt", "x", "-fx", ""])))
def test_scan_output_flags_never_fails(words: list[str]) -> None:
    assert scan_output_flags(words).get("format") in {None, "json"}


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("list", 0),
        ("-f json --prompt x", 2),
        ("--format=json -v --timeout 3 list", 4),
        ("-fjson list", 1),
        ("-f json", None),
        ("", None),
    ],
)
def test_first_argument_index(words: str, place: int | None) -> None:
    assert first_argument_index(words.split()) == place


# --- lazy groups ------------------------------------------------------------------------------


@click.command()
@click.argument("name", required=False)
@click.option("--prompt")
def sample(name: str | None, prompt: str | None) -> None:
    """Sample."""
    SEEN.append(("sample", prompt))


@click.command()
def far() -> None:
    """A command in another module."""
    SEEN.append("far")


HERE = "tests.unit.cli.test_options"
ENTRIES = {
    "far": LazyCommand(f"{HERE}:far", "Far."),
    "sample": LazyCommand(f"{HERE}:sample", "Sample."),
}


@click.group(
    cls=DefaultGroup,
    default_command="sample",
    entries=ENTRIES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def defaulting() -> None:
    """A group that samples."""


def test_options_select_the_default_command() -> None:
    for words in (["--prompt", "x"], ["-f", "json", "--prompt", "x"], ["sample", "--prompt", "x"]):
        SEEN.clear()
        defaulting.main(words, standalone_mode=False)
        assert SEEN == [("sample", "x")]


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_flag_prints_group_help(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    defaulting.main([flag], standalone_mode=False)
    assert "Commands:\n  far     Far." in capsys.readouterr().out


def test_misspelled_command_is_not_the_default() -> None:
    with pytest.raises(click.UsageError, match="smaple"):
        defaulting.main(["smaple"], standalone_mode=False)


def test_lazy_command_is_imported_when_called() -> None:
    SEEN.clear()
    defaulting.main(["far"], standalone_mode=False)
    assert SEEN == ["far"]


def test_summaries_do_not_import_commands(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = LazyGroup("x", entries={"gone": LazyCommand("no.such.module:x", "Is listed.")})
    nowhere.main(["--help"], standalone_mode=False)
    assert "gone  Is listed." in capsys.readouterr().out


def test_group_help_shows_options_of_default_command() -> None:
    shown = CliRunner().invoke(main, ["checkpoint", "--help"]).stdout
    assert "Options of `create`, also without its name:" in shown
    assert "--base-model NAME" in shown
    assert shown.index("--rank N") < shown.index("Commands:")


@pytest.mark.parametrize("words", [("run", "sample"), ("sample",)])
def test_sample_help_lists_every_flag(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--help"]).exit_code == 0
    shown = capsys.readouterr().out
    sampling = "max-tokens temperature top-k top-p num-samples http-pool output json"
    where = "base-model model-path prompt prompt-file api-key base-url timeout"
    for flag in f"{sampling} {where}".split():
        assert f"--{flag}" in shown


@pytest.mark.parametrize(
    ("words", "forms"),
    [
        (("checkpoint", "download"), ("-o, --output", "-f, --format", "-h, --help")),
        (("checkpoint", "delete"), ("-y, --yes", "-f, --format", "-h, --help")),
        (("run", "sample"), ("-o, --output", "-v, --verbose")),
    ],
)
def test_help_shows_short_and_long_forms(
    words: tuple[str, ...], forms: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("-h", "--help"):
        assert run([*words, flag]).exit_code == 0
        shown = capsys.readouterr().out
        assert [form for form in forms if form not in shown] == []
