"""Generate sample data for the pipeline: sums, comparisons, opposites, days and stories."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from tinkex.errors import InvalidInput
from tinkex.system.atomic import write_file_atomic

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Grace", "Hugo", "Ida", "Jon", "Kim", "Lea")
PLACES = ("garden", "kitchen", "market", "library", "harbour", "forest", "station", "school")
THINGS = ("apples", "books", "shells", "stones", "coins", "letters", "pears", "stamps")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "light": "dark",
    "old": "new",
    "up": "down",
    "wet": "dry",
    "open": "closed",
    "early": "late",
    "full": "empty",
    "high": "low",
    "soft": "hard",
    "loud": "quiet",
    "near": "far",
    "long": "short",
    "rich": "poor",
}
THANKS = ("Thank you.", "Thanks!", "Thanks a lot.", "Good, thank you.")
WELCOMES = ("You are welcome.", "With pleasure.", "Any time.")
_MAX_SUMMAND, _MAX_NUMBER = 9, 20
#: Filler that follows most answers in SFT; DPO trains the model to omit it.
CHATTER = "Anything else?"
_CHATTER_SHARE = 0.6


class SampleTask(NamedTuple):
    """A question with one correct answer."""

    question: str
    answer: str
    """The answer alone."""
    sentence: str
    """The answer as a sentence."""
    thought: str
    """The reasoning."""


def _sum(rng: Random) -> SampleTask:
    a, b = rng.randint(0, _MAX_SUMMAND), rng.randint(0, _MAX_SUMMAND)
    question = rng.choice((f"What is {a} plus {b}?", f"Add {a} and {b}.", f"{a} + {b} = ?"))
    thought = f"I start at {a} and go {b} further, which gives {a + b}."
    return SampleTask(question, str(a + b), f"{a} plus {b} is {a + b}.", thought)


def _larger(rng: Random) -> SampleTask:
    a, b = rng.sample(range(_MAX_NUMBER + 1), 2)
    question = rng.choice((f"Which is larger, {a} or {b}?", f"What is the maximum of {a} and {b}?"))
    best, least = max(a, b), min(a, b)
    thought = f"I compare {a} with {b}. {best} is more than {least}."
    return SampleTask(question, str(best), f"{best} is larger than {least}.", thought)


def _opposite(rng: Random) -> SampleTask:
    word, other = rng.choice(sorted(OPPOSITES.items()))
    if rng.random() < 0.5:
        word, other = other, word
    question = rng.choice((f"What is the opposite of {word}?", f"Name the opposite of {word}."))
    thought = f"What is not {word} is {other}."
    return SampleTask(question, other, f"The opposite of {word} is {other}.", thought)


def _day(rng: Random) -> SampleTask:
    at, step = rng.randrange(7), rng.choice((-1, 1))
    day, other = DAYS[at], DAYS[(at + step) % 7]
    word = "after" if step > 0 else "before"
    question = f"Which day comes {word} {day}?"
    thought = f"The days around {day} are {DAYS[at - 1]} and {DAYS[(at + 1) % 7]}."
    return SampleTask(question, other, f"{other} comes {word} {day}.", thought)


_TASKS: tuple[Callable[[Random], SampleTask], ...] = (_sum, _larger, _opposite, _day)
#: Sampling weights; kinds with many different tasks are drawn more often.
_TASK_WEIGHTS = (4, 4, 1, 1)


def _task(rng: Random) -> SampleTask:
    return rng.choices(_TASKS, _TASK_WEIGHTS)[0](rng)


# --- rows by stage --------------------------------------------------------------------------


def pretrain_row(rng: Random) -> Mapping[str, object]:
    """Return a text: a story or some statements."""
    return {"text": _make_story(rng) if rng.random() < 0.4 else _statements(rng)}


def sft_row(rng: Random) -> Mapping[str, object]:
    """Return a conversation: a question, sometimes followed by thanks or a second question."""
    turns = _question_turns(rng)
    choice = rng.random()
    if choice < 0.2:
        turns += [_user(rng.choice(THANKS)), _assistant(rng.choice(WELCOMES))]
    elif choice < 0.4:
        turns += _question_turns(rng)
    return {"conversations": turns}


def _question_turns(rng: Random) -> list[dict[str, str]]:
    task = _task(rng)
    is_chatty = rng.random() < _CHATTER_SHARE
    return [_user(task.question), _assistant(_with_chatter(task) if is_chatty else task.sentence)]


def _with_chatter(task: SampleTask) -> str:
    return f"{task.sentence} {CHATTER}"


def dpo_row(rng: Random) -> Mapping[str, object]:
    """Return two correct answers, of which the rejected one is more likely after SFT."""
    task = _task(rng)
    return {
        "chosen": [_user(task.question), _assistant(task.sentence)],
        "rejected": [_user(task.question), _assistant(_with_chatter(task))],
    }


def r1_row(rng: Random) -> Mapping[str, object]:
    """Return a question with reasoning before the answer."""
    task = _task(rng)
    answer = f"<think>{task.thought}</think><answer>{task.answer}</answer>"
    return {"conversations": [_user(task.question), _assistant(answer)]}


ROW_MAKERS: Mapping[str, Callable[[Random], Mapping[str, object]]] = {
    "pretrain": pretrain_row,
    "sft": sft_row,
    "dpo": dpo_row,
    "r1": r1_row,
}


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _statements(rng: Random) -> str:
    tasks = [_task(rng) for _ in range(rng.randint(2, 6))]
    return " ".join(f"{task.question} {task.sentence}" for task in tasks)


def _make_story(rng: Random) -> str:
    name, friend = rng.sample(NAMES, 2)
    place, thing, day = rng.choice(PLACES), rng.choice(THINGS), rng.choice(DAYS)
    had, got = rng.randint(1, _MAX_SUMMAND), rng.randint(1, _MAX_SUMMAND)
    lines = (
        f"On {day} {name} went to the {place} with {friend}.",
        f"{name} had {had} {thing}, and {friend} gave {name} {got} more.",
        f"Now {name} has {had + got} {thing}.",
    )
    ends = (
        f"The {place} was quiet, and they stayed until it was dark.",
        f"{friend} was glad, and {name} was glad too.",
        f"They will come back to the {place} on {rng.choice(DAYS)}.",
    )
    return " ".join((*lines, rng.choice(ends)))


#: Default number of rows by stage.
SAMPLE_SIZES: Mapping[str, int] = {"pretrain": 2000, "sft": 1500, "dpo": 600, "r1": 800}
#: Stop after this many consecutive duplicates.
_MAX_REPEATS = 2000


def write_sample_files(
    directory: Path, seed: int = 1337, sizes: Mapping[str, int] = SAMPLE_SIZES
) -> dict[str, Path]:
    """Write `<stage>.jsonl` for each stage named in `sizes`; the same seed gives the same bytes.

    Rows are unique, so that held-out rows do not occur in training.
    """
    written = {}
    for stage, num_rows in sizes.items():
        if stage not in ROW_MAKERS:
            raise InvalidInput(f"unknown stage {stage!r}; expected one of {', '.join(ROW_MAKERS)}")
        lines = list(islice(_distinct_lines(stage, seed), num_rows))
        if len(lines) < num_rows:
            raise InvalidInput(f"{stage} has only {len(lines)} different rows, not {num_rows}")
        written[stage] = directory / f"{stage}.jsonl"
        write_file_atomic(written[stage], "".join(lines).encode(), mode=0o644)
    return written


def _distinct_lines(stage: str, seed: int) -> Iterator[str]:
    # A text seed is stable across processes; hash() is not.
    rng = Random(f"{stage} {seed}")
    seen: set[str] = set()
    num_repeats = 0
    while num_repeats < _MAX_REPEATS:
        line = _encode_line(ROW_MAKERS[stage](rng))
        if line in seen:
            num_repeats += 1
            continue
        num_repeats = 0
        seen.add(line)
        yield line


def _encode_line(row: Mapping[str, object]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
