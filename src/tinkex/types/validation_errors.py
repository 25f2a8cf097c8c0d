"""Error messages for invalid input of values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

_PROBLEM = re.compile(r"^(?P<problem>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_PATH_PART = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")
_MISSING = re.compile(r"missing required field `(\w+)`")
_WORD = re.compile(r"\w+")
#: Python names of msgspec's JSON types.
_PYTHON_NAMES = {"array": "list", "object": "dict", "null": "None"}


def explain_unknown(cls: Any, names: Iterable[str]) -> str:
    """Name the unknown keyword and suggest a similar one."""
    unknown = next(name for name in names if name not in cls.__accepted__)
    close = difflib.get_close_matches(unknown, sorted(cls.__accepted__), n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{cls.__name__} has no field {unknown!r}{hint}"


def explain_mismatch(cls: type, fields: Mapping[str, Any], problem: str) -> str:
    """Describe which field of the input is invalid, with its value."""
    _, path = split_problem(problem)
    steps = [name for name, _, _ in _PATH_PART.findall(path) if name]
    choices = _literal_values(get_type_hints(cls).get(steps[0])) if len(steps) == 1 else []
    if problem.startswith("Invalid") and choices:
        value, expected = value_at(fields, path), " or ".join(map(repr, choices))
        return f"{cls.__name__}{path} is {value!r:.80}; expected {expected}"
    return explain_value(cls.__name__, fields, problem)


def explain_value(name: str, data: Any, problem: str) -> str:
    """Translate msgspec's error about `data`, named `name`, to Python's terms."""
    text, path = split_problem(problem)
    if missing := _MISSING.search(text):
        return f"{name}{path} needs {missing[1]!r}"
    words = _WORD.sub(lambda word: _PYTHON_NAMES.get(word[0], word[0]), text.replace("`", ""))
    return f"{name}{path} is {value_at(data, path)!r:.80}; {words[:1].lower()}{words[1:]}"


def split_problem(problem: str) -> tuple[str, str]:
    """Split msgspec's error into the problem and the path."""
    match = _PROBLEM.match(problem)
    assert match is not None
    return match["problem"], match["path"] or ""


def value_at(data: Any, path: str) -> Any:
    """Return the part of the input at a path such as `.chunks[0].tokens`, as far as it exists."""
    for name, index, _ in _PATH_PART.findall(path):
        key = name or (int(index) if index else None)
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            data = getattr(data, name, data) if name else data
    return data


def _literal_values(hint: Any) -> list[Any]:
    """Return all literals in a field's type."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in _literal_values(part)]
