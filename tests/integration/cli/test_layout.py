"""Rules for the CLI's source: exits, environment variables, clients, docstrings."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tinkex.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
CLI = ROOT / "src" / "tinkex" / "cli"
SOURCES = sorted(CLI.rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def attributes(path: Path) -> set[str]:
    """Return every `name.attribute` expression in a file."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def relative_to_cli(path: Path) -> str:
    return str(path.relative_to(CLI))


def test_only_main_exits_the_process() -> None:
    ends = {"sys.exit", "os._exit", "os.abort", "os.kill"}
    found = {relative_to_cli(path): sorted(attributes(path) & ends) for path in SOURCES}
    # These two signal or probe other processes.
    others = {"commands/serve.py", "commands/doctor/checks.py"}
    assert {name for name, used in found.items() if used} - others == {"main.py"}


def test_cli_does_not_read_environment_variables() -> None:
    reads = {"os.environ", "os.getenv", "os.environb"}
    assert [relative_to_cli(path) for path in SOURCES if attributes(path) & reads] == []


def test_only_client_module_creates_clients() -> None:
    classes = {"ServiceClient", "RestClient", "AdminClient"}
    found = {
        relative_to_cli(path)
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in classes
    }
    assert found == {"client.py"}


def test_public_names_have_docstrings() -> None:
    undocumented = [
        f"{relative_to_cli(path)}: {getattr(node, 'name', 'the module')}"
        for path in SOURCES
        for node in [tree(path), *tree(path).body]
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        and not getattr(node, "name", "").startswith("_")
        and not ast.get_docstring(node)
    ]
    assert undocumented == []


def test_each_group_has_its_own_module() -> None:
    modules = [entry.import_path.partition(":")[0] for entry in COMMANDS.values()]
    shared = {module for module in modules if modules.count(module) > 1}
    # `usage` and its alias are the only commands that share a module.
    assert shared == {COMMANDS["usage"].import_path.partition(":")[0]}
    assert all(module.startswith("tinkex.cli.commands.") for module in modules)


def test_core_modules_and_output_classes_exist() -> None:
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
