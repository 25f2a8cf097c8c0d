"""A Griffe extension: adds the descriptions in parameters.toml to methods in the API reference."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import griffe

DESCRIPTIONS: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("parameters.toml").read_text(encoding="utf-8")
)


def describe(owner: str, method: str, parameter: str) -> str | None:
    """Return the description of a parameter."""
    return DESCRIPTIONS.get(f"{owner}.{method}.{parameter}") or DESCRIPTIONS.get(parameter)


class ParameterDescriptions(griffe.Extension):
    """Appends an `Args` section to docstrings of client methods."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Add the section; the docstring of an async variant refers to the sync method."""
        is_client = func.path.startswith("tinkex.client.") and isinstance(func.parent, griffe.Class)
        if not is_client or func.name.endswith("_async"):
            return
        lines = [
            f"    {parameter.name}: {text}"
            for parameter in func.parameters
            if (text := describe(func.parent.name, func.name, parameter.name))
        ]
        if not lines:
            return
        if func.docstring is None:
            func.docstring = griffe.Docstring("", parent=func, parser="google")
        func.docstring.value += "\n\nArgs:\n" + "\n".join(lines)
