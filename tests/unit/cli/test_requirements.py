"""Every requirement of the command line, and the tests that show that it is met.

S0, S1, X and S3 are the rows of the requirements, P-xx the mistakes numbered in the runtime rules,
12.x the weak points numbered in section 12 of the description of the protocol.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tinkex.cli.main import COMMANDS, run

ROOT = Path(__file__).parents[3]
CLI = ROOT / "src" / "tinkex" / "cli"
SOURCES = sorted(CLI.rglob("*.py"))
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef)
IDS = [
    *(f"S0-{number:02}" for number in range(1, 8)),
    *(f"S0-08{letter}" for letter in "abcdefghijk"),
    *(f"S0-{number:02}" for number in range(9, 26)),
    *(f"S1-{number:02}" for number in range(1, 45)),
    *(f"X-{number:02}" for number in range(1, 12)),
    *(f"S3-{number:02}" for number in range(1, 21)),
    *(f"S3-G{number:02}" for number in range(1, 23)),
    *(f"S3-{number}" for number in range(30, 46)),
    *(f"12.{number}" for number in range(28, 39)),
    *(f"P-{number}" for number in range(26, 34)),
    "P-45",
    "P-49",
]

_DOCS = "a page of the documentation; its commands and code are run by the tests of the docs"
_GATE = "a gate that `make qa` runs"
NOT_A_TESTS_MATTER = {
    "S0-19": _DOCS,
    "S0-22": _GATE,
    "S0-23": "context: what to read first",
    "S0-24": "context: the order of the original work",
    "S0-25": "context: how work is handed over",
    "S1-15": "context: what training calls return",
    "S1-30": _DOCS,
    "S1-31": _DOCS,
    "S1-34": _GATE,
    "S1-36": _DOCS,
    "S1-37": _DOCS,
    "S1-38": _DOCS,
    "S1-39": _DOCS,
    "S1-40": _DOCS,
    "S1-42": _DOCS,
    "S1-43": _GATE,
    "X-08": _GATE,
    "X-09": _DOCS,
    "S3-41": _DOCS,
    "S3-42": _DOCS,
    "S3-43": _DOCS,
    "S3-44": "context: which libraries may be used",
    "S3-45": "context: in which order to build",
}

#: One test in each line, its path below tests/.
TABLE = Path(__file__).with_name("requirements.txt")


def read_table() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for line in filter(None, TABLE.read_text("utf-8").splitlines()):
        requirement, test = line.split()
        found[requirement] += (f"tests/{test}",)
    return dict(found)


REQUIREMENTS = read_table()


# --- the table --------------------------------------------------------------------------------


def test_every_requirement_is_shown_or_is_not_a_tests_matter() -> None:
    forgotten = [one for one in IDS if one not in REQUIREMENTS | NOT_A_TESTS_MATTER]
    assert not forgotten, f"no test and no reason for {', '.join(forgotten)}"
    twice = sorted(REQUIREMENTS.keys() & NOT_A_TESTS_MATTER.keys())
    assert not twice, f"both shown and called no test's matter: {', '.join(twice)}"
    unknown = sorted((REQUIREMENTS.keys() | NOT_A_TESTS_MATTER.keys()) - set(IDS))
    assert not unknown, f"no such requirement: {', '.join(unknown)}"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def names_in(path: str) -> set[str]:
    """The test functions of a file; empty when there is no such file."""
    file = ROOT / path
    body = tree(file).body if file.exists() else []
    return {node.name for node in body if isinstance(node, NAMED) and node.name.startswith("test_")}


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_the_tests_of_a_requirement_exist(requirement: str) -> None:
    for test in REQUIREMENTS[requirement]:
        path, _, name = test.partition("::")
        assert name in names_in(path), f"{requirement} is shown by {test}, which does not exist"
    assert len(set(REQUIREMENTS[requirement])) == len(REQUIREMENTS[requirement])


# --- requirements about the code itself -------------------------------------------------------


def attributes(path: Path) -> set[str]:
    """Every `name.attribute` that a file mentions."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def in_cli(path: Path) -> str:
    return str(path.relative_to(CLI))


def test_only_the_entry_ends_the_process() -> None:
    """S0-15, S1-09."""
    ends = {"sys.exit", "os._exit", "os.abort", "os.kill"}
    found = {in_cli(path): sorted(attributes(path) & ends) for path in SOURCES}
    # A server that is told to stop is another process, and so is a Python that is looked at.
    others = {"commands/serve.py", "commands/doctor/checks.py"}
    assert {name for name, used in found.items() if used} - others == {"main.py"}


def test_the_command_line_reads_no_variables() -> None:
    """S0-16, S1-13: `Config` and the settings do."""
    reads = {"os.environ", "os.getenv", "os.environb"}
    assert [in_cli(path) for path in SOURCES if attributes(path) & reads] == []


def test_unit_tests_of_the_command_line_use_no_network() -> None:
    """S0-18, S1-17."""
    roads = {"socket", "httpx", "urllib.request", "http.client", "http.server"}
    for path in sorted((ROOT / "tests" / "unit" / "cli").rglob("*.py")):
        nodes = list(ast.walk(tree(path)))
        used = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        used |= {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not used & roads, path
        assert "StubServer" not in names, path


def test_clients_are_made_in_one_place() -> None:
    """S3-G17."""
    makers = {"ServiceClient", "RestClient", "AdminClient"}
    found = {
        in_cli(path)
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers
    }
    assert found == {"client.py"}


def test_every_public_name_is_documented() -> None:
    """S1-41."""
    bare = [
        f"{in_cli(path)}: {getattr(node, 'name', 'the module')}"
        for path in SOURCES
        for node in [tree(path), *tree(path).body]
        if isinstance(node, (ast.Module, ast.ClassDef, *NAMED))
        and not getattr(node, "name", "").startswith("_")
        and not ast.get_docstring(node)
    ]
    assert bare == []


def test_every_group_is_a_module_of_its_own() -> None:
    """S3-04, S3-G18; the same thing under two names has one home."""
    homes = [entry.import_path.partition(":")[0] for entry in COMMANDS.values()]
    again = {home for home in homes if homes.count(home) > 1}
    assert again == {COMMANDS["usage"].import_path.partition(":")[0]}
    assert all(home.startswith("tinkex.cli.commands.") for home in homes)


def test_the_layout_is_the_agreed_one() -> None:
    """S3-07: entry, context, formats, errors, client factory, outputs and commands."""
    modules = ("main", "lazy", "options", "context", "format", "errors", "client", "prompts")
    for name in (*modules, "progress", "output/base"):
        assert (CLI / f"{name}.py").is_file(), name
    classes = {
        node.name
        for path in SOURCES
        if path.is_relative_to(CLI / "output")
        for node in tree(path).body
        if isinstance(node, ast.ClassDef)
    }
    lists = {"CheckpointList", "CheckpointInfo", "CheckpointDownload", "RunList", "RunInfo"}
    assert {"Output", *lists} <= classes


def test_the_package_installs_the_command() -> None:
    """S1-03."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"]["tinkex"] == "tinkex.cli.main:main"


@pytest.mark.parametrize("words", [("run", "sample"), ("sample",)])
def test_sampling_has_every_flag(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """S3-19."""
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
def test_short_forms(
    words: tuple[str, ...], forms: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """S3-G21: the help shows both."""
    for flag in ("-h", "--help"):
        assert run([*words, flag]).exit_code == 0
        shown = capsys.readouterr().out
        assert [form for form in forms if form not in shown] == []
