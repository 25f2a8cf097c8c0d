"""Docs of the command line: commands exist, examples parse, scripts run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tinker.cli.__main__ import main_cli as official

import tinkex
from tests.integration.doc_pages import DOCS, ENVIRONMENT, GENERATOR, PAGES, ROOT, write_tokenizer
from tinkex import settings
from tinkex.cli.errors import ERROR_TITLES
from tinkex.cli.lazy import DefaultGroup, first_argument_index
from tinkex.cli.main import main
from tinkex.cli.options import GlobalOption
from tinkex.testing import StubServer

#: The arguments after `tinkex` in code, up to the end of the command.
NAMED = re.compile(r"(?:^|\$ |\$\()tinkex ((?:--)?[a-z][^`#|;&\n]*)", re.MULTILINE)
CODE = re.compile(r"```(?:sh|text|console)\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def named_commands(page: Path) -> Iterator[str]:
    """Return every `tinkex` command line on a page, in blocks and in sentences."""
    for block, inline in CODE.findall(page.read_text(encoding="utf-8").replace("\\\n", " ")):
        lines = [line for line in block.splitlines() if line.startswith(("$ ", "tinkex "))]
        found = NAMED.findall("\n".join([*lines, inline]))
        # Syntax templates, and messages of the server.
        yield from (text for text in found if not re.search(r"\[OPTIONS]|^server ready", text))


def split_words(text: str) -> list[str]:
    """Split a command line into words, without redirections."""
    return shlex.split(re.sub(r"[<>] *\S+", "", text), comments=True)


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that the words name, and the remaining words."""
    command: click.Command = main
    while isinstance(command, click.Group):
        place = first_argument_index(words)
        name = "--help" if place is None else words[place]
        if not name.startswith("-"):
            words = words[:place] + words[(place or 0) + 1 :]
        elif isinstance(command, DefaultGroup) and name not in {"--help", "-h"}:
            name = command.default_command
        else:
            break
        found = command.get_command(click.Context(command, **main.context_settings), name)
        assert found is not None, f"unknown command {name}"
        command = found
    return command, words


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_documented_command_exists(page: Path) -> None:
    for text in named_commands(page):
        command, words = find_command(split_words(text))
        options = command.get_params(click.Context(command, **main.context_settings))
        flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
        used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= flags | {"--help", "-h", "--version"}, f"{page.name} says tinkex {text}"


CLI = DOCS / "cli"
COMMAND_EXAMPLES = tomllib.loads((CLI / "examples.toml").read_text(encoding="utf-8"))
#: The model named on these pages; the test server has a small one under this name.
CLI_MODEL = "smollm2-135m"
CLI_BLOCK = re.compile(r"<!-- run -->\n\n```sh\n(.*?)```", re.DOTALL)
CLI_SCRIPTS = {
    str(page.relative_to(DOCS)): "".join(CLI_BLOCK.findall(page.read_text(encoding="utf-8")))
    for page in [*sorted(CLI.glob("*.md")), DOCS / "recipes.md"]
}
CLI_SCRIPTS = {name: script for name, script in CLI_SCRIPTS.items() if script}


def test_reference_has_every_command_option_and_argument() -> None:
    page = (CLI / "reference.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^##+ (tinkex .+?)\n(.*?)(?=^##+ |\Z)", page, re.M | re.S))
    known = [ctx for ctx in GENERATOR.contexts() if ctx.parent]
    assert [ctx.command_path for ctx in known] == list(sections)
    assert len(known) >= 50
    for ctx in known:
        section = sections[ctx.command_path]
        for param in ctx.command.get_params(ctx):
            is_shared = isinstance(param, GlobalOption) or "--help" in param.opts
            place = page if is_shared else section
            is_option = isinstance(param, click.Option)
            words = [*param.opts, *param.secondary_opts] if is_option else [param.make_metavar(ctx)]
            assert [word for word in words if word not in place] == [], ctx.command_path


def test_every_command_has_a_valid_example() -> None:
    leaves = {
        ctx.command_path.removeprefix("tinkex ")
        for ctx in GENERATOR.contexts()
        if not isinstance(ctx.command, click.Group) or ctx.command.invoke_without_command
    }
    assert COMMAND_EXAMPLES.keys() >= leaves - {"tinkex"}
    for name, text in COMMAND_EXAMPLES.items():
        assert text.startswith(f"tinkex {name}"), text
        command, words = find_command(split_words(text.removeprefix("tinkex ")))
        # Parses and validates the words without invoking the command.
        with click.Context(main, info_name="tinkex", **main.context_settings) as parent:
            command.make_context(name, words, parent=parent)


def test_faq_covers_every_error_category() -> None:
    page = (CLI / "faq.md").read_text(encoding="utf-8")
    titles = [title.partition("{")[0].strip() for _, title, _ in ERROR_TITLES]
    assert len(titles) >= 12
    kinds = {"The operation failed", "API error"}  # these continue with the server's message
    assert [title for title in titles if title not in kinds and f"`{title}" not in page] == []


def test_documented_profiles_are_valid(tmp_path: Path) -> None:
    [text] = re.findall(r"```toml\n(.*?)```", (CLI / "profiles.md").read_text(), re.DOTALL)
    (tmp_path / "config.toml").write_text(text)
    environment = settings.Environment(home=tmp_path)
    assert tinkex.Config.new(environment=environment).base_url == "https://gpu.example:8000"
    hosted = tinkex.Config.new(environment=environment, profile="hosted")
    assert (hosted.project_id, hosted.timeout_seconds) == ("my-project", 120)


@pytest.mark.parametrize("page", CLI_SCRIPTS)
def test_commands_of_cli_pages_run(page: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / CLI_MODEL)
    with StubServer(models=(CLI_MODEL,)) as server:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", CLI_SCRIPTS[page]],
            cwd=tmp_path,
            env={name: text for name, text in ENVIRONMENT.items() if not name.startswith("TINKE")}
            | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-docs", "HOME": str(tmp_path)}
            | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr


def test_official_commands_and_options_are_implemented_and_documented() -> None:
    page = (CLI / "migration.md").read_text(encoding="utf-8")
    for ctx in GENERATOR.walk(official, click.Context(official, info_name="tinker")):
        words = ctx.command_path.split()[1:]
        if isinstance(ctx.command, click.Group):
            continue
        command, left = find_command(words)
        assert left == [], words
        options = command.get_params(click.Context(command))
        ours = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
        theirs = {flag for option in ctx.command.params for flag in option.opts if flag[0] == "-"}
        assert theirs <= ours | {"--help", "-h"}, words
        assert re.search(rf"\b{words[-1]}`", page), words
