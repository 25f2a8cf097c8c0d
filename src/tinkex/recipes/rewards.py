"""A reward function of the user's own, loaded from a Python file."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tinkex.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """Judges an answer; more is better."""

    name: str
    """FILE.py:FUNCTION, as it was given."""
    digest: str
    """The SHA-256 of the file."""
    function: Callable[[dict[str, Any], str], float] = field(repr=False)

    def __call__(self, row: Mapping[str, Any], text: str) -> float:
        """The reward of an answer to the prompt of a row."""
        try:
            # A copy: what a function does to its row must not reach the next answer.
            given = self.function(dict(row), text)
        except Exception as error:
            raise InvalidInput(
                f"the reward {self.name} failed on {text[:80]!r}: {type(error).__name__}: {error}"
            ) from error
        try:
            value = float(given)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise InvalidInput(
                f"the reward {self.name} returned {given!r:.80} for {text[:80]!r}; "
                "expected a finite number"
            )
        return value


def load_reward(text: str) -> RewardFunction:
    """The function that FILE.py:FUNCTION names; the file is run once."""
    file, colon, function_name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not function_name.isidentifier():
        raise InvalidInput(
            f"the reward is {text!r}; expected FILE.py:FUNCTION",
            hint="The function takes (row, text) and returns a number; more is better.",
        )
    path = Path(file)
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInput(f"the reward file {path} cannot be read: {reason}") from error
    function = getattr(_load_module(path), function_name, None)
    if not callable(function):
        raise InvalidInput(f"{path} has no function {function_name!r}")
    return RewardFunction(text, hashlib.sha256(content).hexdigest(), function)


def _load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tinkex_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    # Classes look their module up, and a file may import those beside it.
    sys.modules[spec.name] = module
    sys.path.append(str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise InvalidInput(
            f"{path} fails when it is run: {type(error).__name__}: {error}"
        ) from error
    return module
