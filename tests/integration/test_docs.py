"""The docs are true: their code runs, their tables are fresh, and nothing public is left out."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click
import pytest
import tokenizers
import yaml

import tinkex
import tinkex.testing
import tinkex.types
from tinkex import settings
from tinkex.cli.lazy import DefaultGroup, first_word
from tinkex.cli.main import main
from tinkex.cli.options import GlobalOption
from tinkex.server.config import ServerConfig
from tinkex.server.config_sources import from_file, read_config, variable_of
from tinkex.testing import StubServer
from tinkex.wire.endpoints import ENDPOINTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: A block of code that this test runs; invisible on the page.
RUN = "<!-- run -->"
#: Enough to see that an example works; what it shows takes longer.
QUICK = {
    "async_training": ["--steps", "5"],
    "custom_loss": ["--steps", "3"],
    "demo": ["--folder", "HERE", "--steps", "3", "--base-steps", "3"],
    "rl_loop": ["--steps", "3", "--group-size", "32"],
    "sampling": ["--num-prompts", "20"],
    "small_model": ["HERE", "--steps", "3"],
    "training_loop": ["--steps", "5"],
}
BASE_MODEL = "Qwen/Qwen3-8B"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}


# --- code in the docs ------------------------------------------------------------------------


class Block(NamedTuple):
    """Python on a page."""

    line: int
    code: str
    is_run: bool


def python_blocks(page: Path) -> list[Block]:
    """The Python blocks of a page; all of the README's are meant to run."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line == "```python"]
    for start in starts:
        end = lines.index("```", start)
        above = next((line for line in reversed(lines[: start - 1]) if line), "")
        is_run = above == RUN or page.name == "README.md"
        found.append(Block(start, "\n".join(lines[start:end]), is_run))
    return found


RUNNABLE = {
    str(page.relative_to(ROOT)): [
        (block.line, block.code) for block in python_blocks(page) if block.is_run
    ]
    for page in [ROOT / "README.md", *PAGES]
    # Those of the server run against a real one, in tests/acceptance/test_docs_commands.py.
    if page.parent.name != "server"
}
RUNNABLE = {name: blocks for name, blocks in RUNNABLE.items() if blocks}

#: Runs the blocks of each page in order, in one namespace; prints what failed.
RUNNER = """
import json, sys, traceback
failures = {}
for page, blocks in json.load(sys.stdin).items():
    names = {"__name__": "docs"}
    try:
        for line, code in blocks:
            exec(compile("\\n" * line + code, page, "exec"), names)
    except BaseException:
        failures[page] = traceback.format_exc()
print()
print(json.dumps(failures))
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters, where a relative path finds it under the model's name."""
    folder.mkdir(parents=True)
    letters = ["[UNK]", *map(chr, range(32, 127))]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "[UNK]",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong on each page; all pages run in one process, which imports torch once."""
    folder = tmp_path_factory.mktemp("docs")
    write_tokenizer(folder / BASE_MODEL)
    with StubServer(models=(BASE_MODEL, "tinkex/bigram")) as server:
        done = subprocess.run(
            [sys.executable, "-c", RUNNER],
            input=json.dumps(RUNNABLE),
            cwd=folder,
            env=ENVIRONMENT | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-docs"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("page", RUNNABLE)
def test_the_code_of_a_page_runs(page: str, failures: dict[str, str]) -> None:
    assert page not in failures, failures[page]


def test_the_guides_have_code_that_runs() -> None:
    guides = ("getting-started", "training", "sampling", "futures-and-errors", "configuration")
    for guide in (*guides, "testing", "parity"):
        assert f"docs/{guide}.md" in RUNNABLE
    assert sum(map(len, RUNNABLE.values())) >= 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_that_is_not_run_at_least_parses(page: Path) -> None:
    for block in python_blocks(page):
        ast.parse(block.code, f"{page.name}:{block.line}")


# --- examples and commands -------------------------------------------------------------------


#: Above every shell block; invisible on the page. What is run or served, acceptance tests do.
MARKS = re.compile(r"<!-- (run|serve|not run: \S.*) -->")


def shell_blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The line above each shell block of a page, and the block."""
    blocks = re.findall(r"([^\n]+)\n\n```sh\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == page.read_text().count("```sh\n")
    yield from blocks


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_shell_block_is_run_or_says_why_not(page: Path) -> None:
    for above, block in shell_blocks(page):
        assert MARKS.fullmatch(above), f"{page.name}: nothing says whether this is run:\n{block}"


#: What follows `tinkex` in code, up to whatever ends a command there.
NAMED = re.compile(r"(?:^|\$ |\$\()tinkex ((?:--)?[a-z][^`#|;&\n]*)", re.MULTILINE)
CODE = re.compile(r"```(?:sh|text|console)\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def named_commands(page: Path) -> Iterator[str]:
    """Every command line of this project that a page shows, in a block or within a sentence."""
    for block, inline in CODE.findall(page.read_text(encoding="utf-8").replace("\\\n", " ")):
        lines = [line for line in block.splitlines() if line.startswith(("$ ", "tinkex "))]
        found = NAMED.findall("\n".join([*lines, inline]))
        # The form of a command, and what a server says.
        yield from (text for text in found if not re.search(r"\[OPTIONS]|^server ready", text))


def split_words(text: str) -> list[str]:
    """A command line as words; redirections are the shell's."""
    return shlex.split(re.sub(r"[<>] *\S+", "", text), comments=True)


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words name, and what is left of them."""
    command: click.Command = main
    while isinstance(command, click.Group):
        place = first_word(words)
        name = "--help" if place is None else words[place]
        if not name.startswith("-"):
            words = words[:place] + words[(place or 0) + 1 :]
        elif isinstance(command, DefaultGroup) and name not in {"--help", "-h"}:
            name = command.default_command
        else:
            break
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"there is no command {name}"
        command = found
    return command, words


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    for text in named_commands(page):
        command, words = find_command(split_words(text))
        options = command.get_params(click.Context(command))
        flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
        used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= flags | {"--help", "-h", "--version"}, f"{page.name} says tinkex {text}"


# --- the command line ------------------------------------------------------------------------


CLI = DOCS / "cli"
COMMAND_EXAMPLES = tomllib.loads((CLI / "examples.toml").read_text(encoding="utf-8"))
#: The model of these pages; the server of the tests has a small one under its name.
CLI_MODEL = "Qwen/Qwen3-0.6B"
CLI_BLOCK = re.compile(r"<!-- run -->\n\n```sh\n(.*?)```", re.DOTALL)
CLI_SCRIPTS = {
    str(page.relative_to(DOCS)): "".join(CLI_BLOCK.findall(page.read_text(encoding="utf-8")))
    for page in [*sorted(CLI.glob("*.md")), DOCS / "recipes.md"]
}
CLI_SCRIPTS = {name: script for name, script in CLI_SCRIPTS.items() if script}


def test_the_reference_has_every_command_option_and_argument() -> None:
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


def test_every_command_has_an_example_that_it_can_read() -> None:
    leaves = {
        ctx.command_path.removeprefix("tinkex ")
        for ctx in GENERATOR.contexts()
        if not isinstance(ctx.command, click.Group) or ctx.command.invoke_without_command
    }
    assert COMMAND_EXAMPLES.keys() >= leaves - {"tinkex"}
    for name, text in COMMAND_EXAMPLES.items():
        assert text.startswith(f"tinkex {name}"), text
        command, words = find_command(split_words(text.removeprefix("tinkex ")))
        # Reads and checks the words; a command does its work only when it is invoked.
        with click.Context(main, info_name="tinkex") as parent:
            command.make_context(name, words, parent=parent)


@pytest.mark.parametrize("page", CLI_SCRIPTS)
def test_the_commands_of_a_page_about_the_command_line_work(page: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    options = [word.replace("HERE", str(tmp_path)) for word in QUICK.get(example.stem, [])]
    done = subprocess.run(
        [sys.executable, str(example), *options],
        env={name: text for name, text in ENVIRONMENT.items() if not name.startswith("TINKE")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


def test_every_example_is_mentioned() -> None:
    text = everything()
    assert [path.name for path in EXAMPLES if path.name not in text] == []


def test_every_make_target_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", (ROOT / "README.md").read_text()))
    assert named >= {"demo", "test", "qa", "bench", "docs"}
    assert named <= targets


def run_tinkex(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("tinkex")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_command_line_answers() -> None:
    assert "version" in run_tinkex("--help")
    assert json.loads(run_tinkex("version", "--json"))["version"] == settings.package_version()


# --- nothing is left out ---------------------------------------------------------------------


def everything() -> str:
    """All pages, as one text."""
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_every_setting_is_explained() -> None:
    page = (DOCS / "configuration.md").read_text()
    names = tinkex.Config.__dataclass_fields__
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_every_environment_variable_is_explained() -> None:
    source = Path(settings.__file__).read_text()
    read = set(re.findall(r'"((?:TINKE[RX]|CLOUDFLARE)_[A-Z_]+)"', source))
    assert len(read) >= 10
    page = (DOCS / "configuration.md").read_text()
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def test_every_setting_of_the_server_is_explained() -> None:
    page = (DOCS / "server" / "configuration.md").read_text()
    missing = [row.name for row in fields(ServerConfig) if f"`{variable_of(row.name)}`" not in page]
    assert missing == []


def test_the_settings_files_in_the_docs_are_ones(tmp_path: Path) -> None:
    page = (DOCS / "server" / "configuration.md").read_text()
    short, complete = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "server.toml"
    file.write_text(short)
    assert from_file(file)["client_flags"] == {"fwdbwd_max_chunk_len": 512}
    assert read_config({"home": tmp_path}, file, environ={}).api_processes == 2
    file.write_text(complete)
    assert from_file(file).keys() == {row.name for row in fields(ServerConfig)} - {"home"}
    assert read_config({"home": tmp_path}, file, environ={}) == ServerConfig(home=tmp_path)


def test_every_endpoint_is_listed() -> None:
    page = (DOCS / "endpoints.md").read_text()
    missing = [
        name for name, row in ENDPOINTS.items() if f"| `{name}` | `{row.method} " not in page
    ]
    assert missing == []


@pytest.mark.parametrize(
    "package", [tinkex, tinkex.types, tinkex.testing], ids=lambda m: m.__name__
)
def test_every_public_name_is_mentioned(package: ModuleType) -> None:
    words = set(re.findall(r"\w+", everything()))
    names = [name for name in package.__all__ if not name.startswith("__")]
    assert [name for name in names if name not in words] == []


# --- pages -----------------------------------------------------------------------------------


def load_generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


@pytest.mark.parametrize("path", GENERATOR.PARTS)
def test_generated_parts_are_fresh(path: str) -> None:
    stale = f"docs/{path} is stale; run python docs/generate.py"
    assert GENERATOR.render(path) == (DOCS / path).read_text(encoding="utf-8"), stale


def test_a_stale_page_is_noticed() -> None:
    page = (DOCS / "configuration.md").read_text().replace("`max_retries`", "`retries`")
    assert GENERATOR.filled(page, "settings", GENERATOR.settings_table()) != page
    with pytest.raises(ValueError, match="has no <!-- generated: nothing -->"):
        GENERATOR.filled(page, "nothing", "")


def site() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return found


def nav_pages(nav: Any) -> Iterator[str]:
    for entry in nav if isinstance(nav, list) else nav.values():
        if isinstance(entry, str):
            yield entry
        else:
            yield from nav_pages(entry)


def test_the_menu_has_every_page_once() -> None:
    listed = list(nav_pages(site()["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_the_site_fetches_nothing() -> None:
    assert site()["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css", "repo_url"} & site().keys()
    assert re.findall(r"!\[[^]]*]\(https?:", everything()) == []


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link, as Markdown's own slugs are made."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    slugs = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[\s-]+", "-", slug) for slug in slugs}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}"
