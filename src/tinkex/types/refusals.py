"""The sentences a value says when it refuses its input."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

_WHERE = re.compile(r"^(?P<problem>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")
_MISSING = re.compile(r"missing required field `(\w+)`")
_WORD = re.compile(r"\w+")
#: What msgspec calls by its JSON name.
_IN_PYTHON = {"array": "list", "object": "dict", "null": "None"}


def explain_unknown(cls: Any, names: Iterable[str]) -> str:
    """Say which keyword the class does not have, and which one was probably meant."""
    unknown = next(name for name in names if name not in cls.__accepted__)
    close = difflib.get_close_matches(unknown, sorted(cls.__accepted__), n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{cls.__name__} has no field {unknown!r}{hint}"


def explain_mismatch(cls: type, fields: Mapping[str, Any], problem: str) -> str:
    """Say in one sentence where the input does not fit, with the value that does not."""
    _, path = split_problem(problem)
    steps = [name for name, _, _ in _STEP.findall(path) if name]
    choices = _choices(get_type_hints(cls).get(steps[0])) if len(steps) == 1 else []
    if problem.startswith("Invalid") and choices:
        value, expected = follow(fields, path), " or ".join(map(repr, choices))
        return f"{cls.__name__}{path} is {value!r:.80}; expected {expected}"
    return explain_place(cls.__name__, fields, problem)


def explain_place(name: str, data: Any, problem: str) -> str:
    """Put msgspec's complaint about `data`, called `name`, in Python's words."""
    text, path = split_problem(problem)
    if missing := _MISSING.search(text):
        return f"{name}{path} needs {missing[1]!r}"
    words = _WORD.sub(lambda word: _IN_PYTHON.get(word[0], word[0]), text.replace("`", ""))
    return f"{name}{path} is {follow(data, path)!r:.80}; {words[:1].lower()}{words[1:]}"


def split_problem(problem: str) -> tuple[str, str]:
    """msgspec's complaint, taken apart into what is wrong and where."""
    match = _WHERE.match(problem)
    assert match is not None
    return match["problem"], match["path"] or ""


def follow(data: Any, path: str) -> Any:
    """The part of the input a path such as `.chunks[0].tokens` points at, as far as it goes."""
    for name, index, _ in _STEP.findall(path):
        key = name or (int(index) if index else None)
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            data = getattr(data, name, data) if name else data
    return data


def _choices(hint: Any) -> list[Any]:
    """Every literal that a field's type allows, however deep it hides."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in _choices(part)]
