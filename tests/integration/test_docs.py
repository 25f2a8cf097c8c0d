"""Docs: code blocks run, generated tables are up to date, all public names are documented."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import tinkex
import tinkex.testing
import tinkex.types
from tests.integration.doc_pages import DOCS, ENVIRONMENT, GENERATOR, PAGES, ROOT, write_tokenizer
from tinkex import settings
from tinkex.models import TINY
from tinkex.server.config import ServerConfig
from tinkex.server.config_sources import read_config, read_from_file, variable_name
from tinkex.testing import StubServer
from tinkex.wire.endpoints import ENDPOINTS

#: Example programs, without their shared module.
EXAMPLES = [
    path for path in sorted((ROOT / "examples").glob("*.py")) if "__main__" in path.read_text()
]
#: Examples that use the local server run in tests/acceptance/test_examples.py; the demo and the
#: longer pipeline run have tests of their own beside it.
ALONE = [
    path
    for path in EXAMPLES
    if "from connection import" not in path.read_text()
    and path.stem not in {"demo", "from_nothing"}
]
#: Marks a code block that this test runs; invisible on the page.
RUN = "<!-- run -->"
#: Reduced sizes that show that an example works.
QUICK = {
    "async_training": ["--steps", "5"],
    "custom_loss": ["--steps", "3"],
    "rl_loop": ["--steps", "3", "--group-size", "32"],
    "sampling": ["--num-prompts", "20"],
    "small_model": ["HERE", "--steps", "3"],
    "training_loop": ["--steps", "5"],
}
BASE_MODEL = "Qwen/Qwen3-8B"


# --- code in the docs ------------------------------------------------------------------------


class Block(NamedTuple):
    """A Python block on a page."""

    line: int
    code: str
    is_run: bool


def python_blocks(page: Path) -> list[Block]:
    """Return the Python blocks of a page; all blocks of the README run."""
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
    # Server pages and tutorials run in tests/acceptance/test_docs_*.
    if page.parent.name not in {"server", "tutorials"}
}
RUNNABLE = {name: blocks for name, blocks in RUNNABLE.items() if blocks}

#: Runs the blocks of each page in order, in one namespace; prints failures.
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


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the failures of each page; all pages run in one process, to import torch once."""
    folder = tmp_path_factory.mktemp("docs")
    for name in (BASE_MODEL, TINY):
        write_tokenizer(folder / name)
    with StubServer(models=(BASE_MODEL, TINY, "tinkex/bigram")) as server:
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
def test_code_of_page_runs(page: str, failures: dict[str, str]) -> None:
    assert page not in failures, failures[page]


def test_guides_have_runnable_code() -> None:
    guides = ("getting-started", "training", "sampling", "futures-and-errors", "configuration")
    for guide in (*guides, "testing", "parity"):
        assert f"docs/{guide}.md" in RUNNABLE
    assert sum(map(len, RUNNABLE.values())) >= 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_unrun_code_parses(page: Path) -> None:
    for block in python_blocks(page):
        ast.parse(block.code, f"{page.name}:{block.line}")


# --- examples and commands -------------------------------------------------------------------


#: Marker above every shell block, invisible on the page. Acceptance tests run marked blocks.
MARKS = re.compile(r"<!-- (run|run with \S+|serve|not run: \S.*) -->")


def shell_blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Return each shell block of a page with the line above it."""
    blocks = re.findall(r"([^\n]+)\n\n```sh\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == page.read_text().count("```sh\n")
    yield from blocks


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_shell_block_is_run_or_marked(page: Path) -> None:
    for above, block in shell_blocks(page):
        assert MARKS.fullmatch(above), f"{page.name}: nothing says whether this is run:\n{block}"


@pytest.mark.parametrize("example", ALONE, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
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


def test_every_example_is_documented() -> None:
    text = all_pages()
    assert [path.name for path in EXAMPLES if path.name not in text] == []


def test_documented_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", (ROOT / "README.md").read_text()))
    assert named >= {"demo", "test", "qa", "bench", "docs"}
    assert named <= targets


def run_tinkex(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("tinkex")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_cli_prints_help_and_version() -> None:
    assert "version" in run_tinkex("--help")
    assert json.loads(run_tinkex("version", "--json"))["version"] == settings.package_version()


# --- completeness ----------------------------------------------------------------------------


def all_pages() -> str:
    """Return all pages as one string."""
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_every_setting_is_documented() -> None:
    page = (DOCS / "configuration.md").read_text()
    names = tinkex.Config.__dataclass_fields__
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_every_environment_variable_is_documented() -> None:
    source = Path(settings.__file__).read_text()
    read = set(re.findall(r'"((?:TINKE[RX]|CLOUDFLARE)_[A-Z_]+)"', source))
    assert len(read) >= 10
    page = (DOCS / "configuration.md").read_text()
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def test_every_server_setting_is_documented() -> None:
    page = (DOCS / "server" / "configuration.md").read_text()
    missing = [
        row.name for row in fields(ServerConfig) if f"`{variable_name(row.name)}`" not in page
    ]
    assert missing == []


def test_documented_settings_files_are_valid(tmp_path: Path) -> None:
    page = (DOCS / "server" / "configuration.md").read_text()
    short, complete = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "server.toml"
    file.write_text(short)
    assert read_from_file(file)["client_flags"] == {"fwdbwd_max_chunk_len": 512}
    assert read_config({"home": tmp_path}, file, environ={}).api_processes == 2
    file.write_text(complete)
    assert read_from_file(file).keys() == {row.name for row in fields(ServerConfig)} - {"home"}
    assert read_config({"home": tmp_path}, file, environ={}) == ServerConfig(home=tmp_path)


def test_every_endpoint_is_documented() -> None:
    page = (DOCS / "endpoints.md").read_text()
    missing = [
        name for name, row in ENDPOINTS.items() if f"| `{name}` | `{row.method} " not in page
    ]
    assert missing == []


@pytest.mark.parametrize(
    "package", [tinkex, tinkex.types, tinkex.testing], ids=lambda m: m.__name__
)
def test_every_public_name_is_documented(package: ModuleType) -> None:
    words = set(re.findall(r"\w+", all_pages()))
    names = [name for name in package.__all__ if not name.startswith("__")]
    assert [name for name in names if name not in words] == []


def public_parameters() -> set[tuple[str, str, str]]:
    """Class, method and name of each parameter of the public clients; async variants left out."""
    clients = (getattr(tinkex, name) for name in GENERATOR.FIRST)
    methods = {
        (function.__qualname__.partition(".")[0], name, function)
        for client in clients
        for name, function in inspect.getmembers(client, inspect.isroutine)
        if inspect.isfunction(function) and not name.startswith("_") and name[-6:] != "_async"
    }
    return {
        (owner, name, parameter)
        for owner, name, function in methods
        for parameter in inspect.signature(function).parameters
        if parameter not in {"self", "cls", "holder"}
    }


def test_every_parameter_of_a_client_is_described() -> None:
    descriptions = tomllib.loads((DOCS / "parameters.toml").read_text())
    parameters = public_parameters()
    assert len(parameters) > 80
    undescribed = [
        f"{owner}.{method}.{name}"
        for owner, method, name in parameters
        if not {name, f"{owner}.{method}.{name}"} & descriptions.keys()
    ]
    assert sorted(undescribed) == []
    known = {name for _, _, name in parameters} | set(map(".".join, parameters))
    of_constructors = {"user_metadata", "config", "transport", "display_name", "base_url"}
    of_constructors |= {"api_key", "default_headers_overrides", "project_id", "timeout"}
    assert sorted(descriptions.keys() - known - of_constructors) == []


# --- pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATOR.PARTS)
def test_generated_parts_are_up_to_date(path: str) -> None:
    stale = f"docs/{path} is stale; run python docs/generate.py"
    assert GENERATOR.render(path) == (DOCS / path).read_text(encoding="utf-8"), stale


def test_stale_page_is_detected() -> None:
    page = (DOCS / "configuration.md").read_text().replace("`max_retries`", "`retries`")
    assert GENERATOR.filled(page, "settings", GENERATOR.settings_table()) != page
    with pytest.raises(ValueError, match="has no <!-- generated: nothing -->"):
        GENERATOR.filled(page, "nothing", "")


def site() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    return project


def nav_pages(nav: Any) -> Iterator[str]:
    for entry in nav if isinstance(nav, list) else nav.values():
        if isinstance(entry, str):
            yield entry
        else:
            yield from nav_pages(entry)


def test_menu_has_every_page_once() -> None:
    listed = list(nav_pages(site()["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_site_loads_only_the_diagram_renderer() -> None:
    assert site()["theme"]["font"] is False
    with_diagrams = [page.name for page in PAGES if "```mermaid" in page.read_text()]
    assert set(with_diagrams) <= {"architecture.md"}
    assert not {"extra_javascript", "extra_css", "repo_url"} & site().keys()
    assert re.findall(r"!\[[^]]*]\(https?:", all_pages()) == []


def anchors(page: Path) -> set[str]:
    """Return the link anchor of a heading, as Markdown generates it."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    slugs = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[\s-]+", "-", slug) for slug in slugs}


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}"
