"""Tasks of the package reasoning-gym, each with reasoning that leads to its answer.

The package provides questions, answers and scores; this module writes the reasoning from the
metadata of a task. Every step is spelled out, because a very small model can only do small steps.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tinkex.errors import ConfigError

#: A task as the package makes it: question, answer, and metadata.
Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of task: its difficulty settings and its reasoning."""

    settings: Mapping[str, int]
    think: Callable[[Mapping[str, Any]], str]
    keeps: Callable[[Entry], bool] = lambda entry: True
    """Filter for tasks, used when one answer is too frequent."""


# --- thoughts -------------------------------------------------------------------------------


def think_sum(about: Mapping[str, Any]) -> str:
    """Add or subtract digit by digit, from the right."""
    left, sign, right = str(about["expression"]).split()
    a, b = int(left), int(right)
    if sign == "+":
        return "; ".join(_added(a, b))
    swapped = f"{b} is larger, so less than 0; " if a < b else ""
    return swapped + "; ".join(_taken(max(a, b), min(a, b)))


def _added(a: int, b: int) -> Iterable[str]:
    carry = ""
    for at, (x, y) in enumerate(_digits(a, b)):
        total = x + y + bool(carry)
        is_first = 10 ** (at + 1) > max(a, b)
        yield f"{x} + {y}{carry} = {total}"
        carry = " + 1" if total > 9 and not is_first else ""


def _taken(a: int, b: int) -> Iterable[str]:
    borrowed = ""
    for x, y in _digits(a, b):
        left = x - bool(borrowed)
        needs = left < y
        yield f"{x + 10 * needs} - {y}{borrowed} = {left + 10 * needs - y}"
        borrowed = " - 1" if needs else ""


def _digits(a: int, b: int) -> Iterable[tuple[int, int]]:
    """Return pairs of digits of the same place, from the right."""
    width = len(str(max(a, b)))
    texts = (str(number).zfill(width)[::-1] for number in (a, b))
    return [(int(x), int(y)) for x, y in zip(*texts, strict=True)]


def think_backward(about: Mapping[str, Any]) -> str:
    """Spell a word, then spell it backward."""
    word = str(about["word"])
    return f"{' '.join(word)}, {' '.join(reversed(word))}"


def think_count(about: Mapping[str, Any]) -> str:
    """Spell the text; after each occurrence of the letter, write the count."""
    wanted, seen, spelled = about["target_letter"], 0, []
    for word in about["span"]:
        letters = []
        for letter in str(word).lower():
            seen += letter == wanted
            letters.append(f"{letter} {seen}" if letter == wanted else letter)
        spelled.append(" ".join(letters))
    return f"{wanted}: {', '.join(spelled)}"


def is_balanced(entry: Entry) -> bool:
    """Keep a quarter of the tasks with the answer 1, which is by far the most frequent."""
    return entry["answer"] != "1" or entry["metadata"]["source_index"] % 4 == 0


KINDS: Mapping[str, Kind] = {
    "chain_sum": Kind(
        settings={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        think=think_sum,
    ),
    "spell_backward": Kind(settings={"min_word_len": 3, "max_word_len": 4}, think=think_backward),
    "letter_counting": Kind(
        settings={"min_words": 2, "max_words": 3}, think=think_count, keeps=is_balanced
    ),
}

# --- rows -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Training tasks and eval tasks; no question is in both."""

    train: Mapping[str, list[Entry]]
    held_out: Mapping[str, list[Entry]]
    makers: Mapping[str, Any]
    """Data sets of the package, which score answers."""


def make_tasks(num_train: int, num_held_out: int, seed: int) -> Tasks:
    """Make tasks: num_held_out of each kind for evaluation, num_train in total for training."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("reasoning-gym is not installed", hint="Run: pip install reasoning-gym")
    create = importlib.import_module("reasoning_gym").create_dataset
    num_each = num_train // len(KINDS)
    makers, train, held_out = {}, {}, {}
    for name, kind in KINDS.items():
        # Make more than needed: tasks that repeat an eval question are dropped.
        maker = create(name, seed=seed, size=4 * (num_each + num_held_out), **kind.settings)
        eval_entries: dict[str, Entry] = {}
        others: list[Entry] = []
        for entry in filter(kind.keeps, maker):
            if len(eval_entries) < num_held_out:
                eval_entries.setdefault(entry["question"], entry)
            elif entry["question"] not in eval_entries:
                others.append(entry)
        makers[name], held_out[name], train[name] = (
            maker,
            [*eval_entries.values()],
            others[:num_each],
        )
    return Tasks(train=train, held_out=held_out, makers=makers)


def make_row(name: str, entry: Entry) -> dict[str, Any]:
    """A task as a conversation for the reasoning stage."""
    thought = KINDS[name].think(entry["metadata"])
    answer = f"<think>{thought}</think><answer>{entry['answer']}</answer>"
    return {
        "conversations": [
            {"role": "user", "content": entry["question"]},
            {"role": "assistant", "content": answer},
        ]
    }


def write_rows(path: Path, tasks: Mapping[str, list[Entry]], seed: int) -> Path:
    """Write all tasks as rows, shuffled; the same seed gives the same bytes."""
    rows = [make_row(name, entry) for name, some in tasks.items() for entry in some]
    Random(f"thoughts {seed}").shuffle(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
