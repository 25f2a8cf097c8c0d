"""The public methods of the official clients, and which of them a scenario calls directly.

Calls are recorded with the interpreter's profiling hook; the official package is not modified.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
_HERE = str(Path(__file__).parent)
#: Files of decorators between a caller and the method.
_BETWEEN = ("sync_only.py", "telemetry.py", "experimental.py", "typing_extensions.py")


def public_methods() -> set[str]:
    """Every public method and property of the official clients, as `Class.name`."""
    import tinker

    return {f"{name}.{member}" for name in CLIENTS for member in _members(getattr(tinker, name))}


def _members(client: type) -> dict[str, CodeType]:
    codes: dict[str, CodeType] = {}
    for base in reversed(client.__mro__):
        if base.__module__.partition(".")[0] != "tinker":
            continue
        for name, value in vars(base).items():
            code = _code_of(value)
            if code is not None and not name.startswith("_"):
                codes[name] = code
    return codes


def _code_of(member: Any) -> CodeType | None:
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    inner = inspect.unwrap(member) if callable(member) else None
    return inner.__code__ if isinstance(inner, FunctionType) else None


@contextmanager
def watched() -> Iterator[set[str]]:
    """Collect the methods that scenarios call on this thread, as `Class.name`."""
    import tinker

    names = {
        code: f"{client}.{member}"
        for client in CLIENTS
        for member, code in _members(getattr(tinker, client)).items()
    }
    called: set[str] = set()

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        name = names.get(frame.f_code) if event == "call" else None
        if name is not None and _is_called_from_here(frame):
            # An inherited method is defined once but called on several classes.
            owner = frame.f_locals.get("self")
            called.add(name if owner is None else f"{type(owner).__name__}.{_last(name)}")

    sys.setprofile(look)
    try:
        yield called
    finally:
        sys.setprofile(None)


def _is_called_from_here(frame: FrameType) -> bool:
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename.endswith(_BETWEEN):
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename.startswith(_HERE)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
