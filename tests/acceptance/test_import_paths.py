"""Every public import path of the installed official package exists below tinkex."""

from __future__ import annotations

import ast
import importlib
import tomllib
from pathlib import Path

import pytest
import tinker
import tinker.types

from tinkex.official_paths import official_modules

TYPES = Path(tinker.types.__file__).parent
#: Modules of `tinker.lib` that scripts import; the rest is internal to its clients.
LIB = ("public_interfaces", "experimental", "internal_client_holder", "retry_handler", "telemetry")


def defined_names(path: Path) -> set[str]:
    """Return the public names that a module defines or exports."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            names.update(ast.literal_eval(node.value) if targets == ["__all__"] else targets)
        elif isinstance(node, ast.ImportFrom):
            # `from x import Y as Y` exports Y.
            names.update(each.name for each in node.names if each.asname == each.name)
    return {name for name in names if not name.startswith("_")}


def expected_types() -> dict[str, set[str]]:
    """Return the names of every public module below `tinker.types`."""
    found = {}
    for path in TYPES.rglob("*.py"):
        parts = path.relative_to(TYPES).with_suffix("").parts
        if path.parent == TYPES and parts == ("__init__",):
            continue
        if not any(part.startswith("_") and part != "__init__" for part in parts):
            found[".".join(part for part in parts if part != "__init__")] = defined_names(path)
    return found


EXPECTED = expected_types()


def test_table_has_exactly_the_official_modules() -> None:
    table = {path.removeprefix("types.") for path in official_modules() if path[:6] == "types."}
    assert len(EXPECTED) > 100
    surface = Path(__file__).parent / "data" / "surface_0_39.toml"
    assert table == EXPECTED.keys() | set(tomllib.loads(surface.read_text())["modules"])


@pytest.mark.parametrize("module", sorted(EXPECTED))
def test_type_modules_have_official_names(module: str) -> None:
    ours = importlib.import_module(f"tinkex.types.{module}")
    missing = {name for name in EXPECTED[module] if not hasattr(ours, name)}
    assert missing == set()
    theirs = importlib.import_module(f"tinker.types.{module}")
    for name in EXPECTED[module]:
        value = getattr(theirs, name)
        assert isinstance(value, type) == isinstance(getattr(ours, name), type), name


def test_type_modules_are_attributes() -> None:
    import tinkex

    assert tinkex.types.tensor_data.TensorData is tinkex.TensorData  # type: ignore[attr-defined]
    assert not hasattr(tinkex.types, "no_such_module")


def test_lib_has_official_exports() -> None:
    theirs = Path(tinker.__file__).parent / "lib" / "public_interfaces"
    package = importlib.import_module("tinker.lib.public_interfaces")
    ours = importlib.import_module("tinkex.lib.public_interfaces")
    assert set(dir(ours)) == set(package.__all__)
    for path in theirs.glob("*_client.py"):
        name = "".join(part.title() for part in path.stem.split("_"))
        module = importlib.import_module(f"tinkex.lib.public_interfaces.{path.stem}")
        assert getattr(module, name) is getattr(ours, name)


@pytest.mark.parametrize("module", LIB)
def test_lib_has_no_other_names(module: str) -> None:
    theirs = importlib.import_module(f"tinker.lib.{module}")
    ours = importlib.import_module(f"tinkex.lib.{module}")
    assert ours.__all__
    for name in ours.__all__:
        assert hasattr(theirs, name) and getattr(ours, name) is not None


def test_exceptions_can_be_imported_from_official_module() -> None:
    exported = {name for name in tinker.__all__ if name.endswith("Error")}
    ours = importlib.import_module("tinkex._exceptions")
    assert {name for name in exported if not hasattr(ours, name)} == set()
