"""The generated reasoning data of examples/thoughts.py is correct."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

PATH = Path(__file__).parents[2] / "examples" / "thoughts.py"
NUMBERS = st.integers(0, 99)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("thoughts", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its own module up.
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "thoughts", module)
        spec.loader.exec_module(module)
    return module


THOUGHTS = load()


@given(NUMBERS, NUMBERS, st.sampled_from("+-"))
def test_sums_are_computed_digit_by_digit(a: int, b: int, sign: str) -> None:
    thought = THOUGHTS.think_sum({"expression": f"{a} {sign} {b}"})
    steps = re.findall(r"(\d+(?: [+-] \d+)+) = (\d+)", thought)
    for step, result in steps:
        left, *others = re.findall(r"[+-]?\d+", step.replace(" ", ""))
        assert int(left) + sum(map(int, others)) == int(result)
    # The last step is the front of the result; of the others, only the last digit counts.
    written = "".join(result[-1] for _, result in steps[:-1])[::-1]
    found = int(steps[-1][1] + written)
    assert (-found if "less than 0" in thought else found) == (a + b if sign == "+" else a - b)


@given(st.text("abcXYZ", min_size=1, max_size=6))
def test_words_are_spelled_and_reversed(word: str) -> None:
    there, back = THOUGHTS.think_backward({"word": word}).split(", ")
    assert there.replace(" ", "") == word
    assert back.replace(" ", "") == word[::-1]


@given(st.lists(st.text("abcABC", min_size=1, max_size=6), min_size=1, max_size=3))
def test_letters_are_counted_per_word(words: list[str]) -> None:
    thought = THOUGHTS.think_count({"target_letter": "a", "span": words})
    text = "".join(words).lower()
    assert thought.startswith("a: ")
    assert re.sub("[ ,0-9]", "", thought[3:]) == text
    assert re.findall(r"a (\d+)", thought) == [str(at + 1) for at in range(text.count("a"))]
