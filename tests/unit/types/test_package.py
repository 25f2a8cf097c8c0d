"""The package `tinkex.types`: lazy names and light imports."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tinkex import types

FILES = sorted(
    path.stem
    for path in Path(types.__file__).parent.glob("*.py")
    if path.stem not in {"__init__", "arrays"}
)


def test_exported_names_match_the_official_package() -> None:
    assert len(types.__all__) == len(set(types.__all__)) == 154
    assert set(types.__all__) <= set(dir(types))
    for name in types.__all__:
        assert getattr(types, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Tensordata'"):
        _ = types.Tensordata  # type: ignore[attr-defined]


def test_type_checkers_and_python_see_the_same_names() -> None:
    source = Path(types.__file__).read_text()
    for name in (*types.__all__, "TopkLogprobs", "GenericEvent"):
        assert f"        {name} as {name}," in source


@pytest.mark.parametrize("name", FILES)
def test_every_module_has_a_docstring(name: str) -> None:
    assert importlib.import_module(f"tinkex.types.{name}").__doc__
