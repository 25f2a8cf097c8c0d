"""The text of tinkex/tiny, stage by stage: every row is made here, from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from tinkex.checkpoint.atomic import write_file_atomic
from tinkex.pipeline.tiny import words
from tinkex.pipeline.tiny.tasks import FAMILIES, UNKNOWN, Task, draw, next_task, some_word

#: Held-out tasks of each family, for the card.
NUM_HELD_OUT = 40
_TRIES_PER_TASK = 50


def write(directory: Path, seed: int, sizes: Mapping[str, int]) -> dict[str, Path]:
    """Write `<stage>.jsonl` for each stage named in `sizes`; the same seed gives the same bytes."""
    written = {}
    for stage, num_rows in sizes.items():
        # A text as a seed gives the same dice in every process; a hash of it would not.
        dice = Random(f"tiny {stage} {seed}")
        lines = [json.dumps(MAKERS[stage](dice)) + "\n" for _ in range(num_rows)]
        written[stage] = directory / f"{stage}.jsonl"
        write_file_atomic(written[stage], "".join(lines).encode(), mode=0o644)
    return written


def held_out(seed: int, num_each: int = NUM_HELD_OUT) -> dict[str, list[Task]]:
    """Tasks that no row has, by family; as many as there are, if that is fewer."""
    return {family: list(_held_out(family, seed, num_each)) for family in FAMILIES}


def _held_out(family: str, seed: int, num_wanted: int) -> Iterator[Task]:
    dice = Random(f"tiny held out {family} {seed}")
    found: set[str] = set()
    for _ in range(num_wanted * _TRIES_PER_TASK):
        task = next_task(family, dice, is_held_out=True)
        if task.question not in found:
            found.add(task.question)
            yield task
        if len(found) == num_wanted:
            return


# --- a row of each stage --------------------------------------------------------------------


def pretrain_row(dice: Random) -> Mapping[str, Any]:
    """A text: a story, somebody who says what another said, or questions with answers."""
    which = dice.random()
    if which < 0.1:
        return {"text": _story(dice, dice.choice(words.ANIMALS))}
    if which < 0.35:
        return {"text": _talk(dice)}
    tasks = [draw(dice)[1] for _ in range(dice.randint(3, 8))]
    return {"text": "\n".join(f"{task.question} {task.answer}" for task in tasks)}


def sft_row(dice: Random) -> Mapping[str, Any]:
    """A talk of one question or two; now and then a story is asked for."""
    num_turns = 2 if dice.random() < 0.25 else 1
    return {"conversations": [said for _ in range(num_turns) for said in _turn(dice)]}


def dpo_row(dice: Random) -> Mapping[str, Any]:
    """A right answer beside one to another question, or beside "I do not know"."""
    family, task = draw(dice)
    other = next_task(family, dice, is_held_out=False)
    while other.answer == task.answer:
        other = draw(dice)[1]
    is_evasive = task.answer != UNKNOWN and dice.random() < 0.3
    bad = UNKNOWN if is_evasive else other.answer
    return {"chosen": _pair(task.question, task.answer), "rejected": _pair(task.question, bad)}


MAKERS: Mapping[str, Callable[[Random], Mapping[str, Any]]] = {
    "pretrain": pretrain_row,
    "sft": sft_row,
    "dpo": dpo_row,
}


def _turn(dice: Random) -> list[dict[str, str]]:
    if dice.random() < 0.04:
        animal = dice.choice(words.ANIMALS)
        asked = (
            f"Tell me a story about a {animal}.",
            f"Tell a short story about a {animal}.",
            f"Write a story about a {animal}.",
        )
        return _pair(dice.choice(asked), _story(dice, animal))
    _, task = draw(dice)
    return _pair(task.question, task.answer)


def _pair(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _talk(dice: Random) -> str:
    """People who repeat each other: text in which what comes has been there before."""
    name, friend = dice.sample(words.NAMES, 2)
    lines = []
    for _ in range(dice.randint(2, 5)):
        said = " ".join(some_word(dice) for _ in range(dice.randint(1, 4)))
        lines += dice.choice(
            (
                [f'{name} said "{said}", and {friend} repeated "{said}".'],
                [f"{name} wrote {said}. {friend} wrote {said}."],
                [f"{name}: {said}", f"{friend}: {said}"],
            )
        )
    return " ".join(lines)


def _story(dice: Random, animal: str) -> str:
    name = dice.choice(words.NAMES)
    place, thing, day = dice.choice(words.PLACES), dice.choice(words.WORDS), dice.choice(words.DAYS)
    ends = (
        f"{name} was glad, and the {animal} was glad too.",
        f"They went home and slept until {dice.choice(words.DAYS)}.",
        f"The {place} was quiet again.",
    )
    return (
        f"One {day} {name} met a {animal} in the {place}. "
        f"The {animal} had lost a {thing}. "
        f"{name} looked for the {thing} and found it. {dice.choice(ends)}"
    )
