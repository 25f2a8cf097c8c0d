"""Consistency of the source tree: used settings, names in prose, and file lengths."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tinkex
import tinkex.types
from tinkex.client.config import Config
from tinkex.settings import Environment
from tinkex.types import ClientConfigResponse

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "tinkex").rglob("*.py"))
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MAX_LINES = 420


def test_no_file_is_too_long() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in SOURCES}
    assert {str(path): length for path, length in lengths.items() if length > MAX_LINES} == {}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def read_names(*, outside: str) -> set[str]:
    """Return every attribute that is read outside the file that declares it."""
    return {
        node.attr
        for path in SOURCES
        if not str(path).endswith(outside) and "testing" not in path.relative_to(ROOT).parts
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize(
    ("names", "home"),
    [
        ([row.name for row in dataclasses.fields(Config)], "client/config.py"),
        (list(Environment._fields), "tinkex/settings.py"),
        (
            [*{*ClientConfigResponse.__struct_fields__} - {"use_pyqwest_transport"}],
            "types/sessions.py",
        ),
    ],
    ids=["Config", "Environment", "ClientConfigResponse"],
)
def test_every_setting_is_used(names: list[str], home: str) -> None:
    """A setting that is declared but never read has no effect."""
    assert sorted(set(names) - read_names(outside=home)) == []


def texts() -> Iterator[tuple[str, str]]:
    """Yield docstrings, and documentation pages without their code blocks."""
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.Module, *NAMED)):
                yield f"{path.name}:{getattr(node, 'name', '')}", ast.get_docstring(node) or ""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield page.name, re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)


def test_docs_reference_existing_names() -> None:
    """Docstrings and pages use only attributes and functions that exist."""
    owners = {name: getattr(home, name) for home in (tinkex, tinkex.types) for name in home.__all__}
    wrong = [
        f"{place} says {owner}.{name}"
        for place, text in texts()
        for owner, name in re.findall(r"\b([A-Z]\w+)\.([a-z]\w*)", text)
        if owner in owners and not hasattr(owners[owner], name)
    ]
    known = {*dir(builtins), "item"}  # that of torch's tensors
    for path in SOURCES:
        known |= {node.name for node in ast.walk(tree(path)) if isinstance(node, NAMED)}
    wrong += [
        f"{place} says {name}()"
        for place, text in texts()
        for name in re.findall(r"\b([a-z_]\w+)\(\)", text)
        if name not in known
    ]
    assert wrong == []
