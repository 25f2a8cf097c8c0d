"""Generated text of tinkex/tiny: correct answers, and no held-out tasks."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.data.rows import STAGE_PARSERS
from tinkex.pipeline.tiny import recipe, tasks
from tinkex.pipeline.tiny.tasks import FAMILIES, TinyTask

SIZES = {"pretrain": 40, "sft": 40, "dpo": 40}
SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[TinyTask]]:
    return recipe.held_out_tasks(7, 12)


def test_output_depends_only_on_the_seed(tmp_path: Path) -> None:
    texts = [
        [path.read_bytes() for path in recipe.write_rows(tmp_path / name, seed, SIZES).values()]
        for name, seed in (("one", 1), ("two", 1), ("three", 2))
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("stage", SIZES)
def test_every_row_parses(stage: str, tmp_path: Path) -> None:
    path = recipe.write_rows(tmp_path, 3, SIZES)[stage]
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == SIZES[stage]
    for row in found:
        STAGE_PARSERS[stage](row)


@given(SEEDS)
def test_arithmetic_is_correct(seed: int) -> None:
    for make, sign in ((tasks.add, 1), (tasks.subtract, -1)):
        task = make(Random(seed))
        a, b = map(int, re.findall(r"\d", task.question))
        if task.question.startswith("Take"):
            a, b = b, a
        assert int(task.answer) == a + sign * b >= 0


@given(SEEDS)
def test_comparisons_and_counting_are_correct(seed: int) -> None:
    task = tasks.compare(Random(seed))
    best = max if re.search("larger|maximum", task.question) else min
    assert int(task.answer) == best(map(int, re.findall(r"\d+", task.question)))
    counted = [int(number) for number in tasks.count(Random(seed)).answer.split(", ")]
    assert {abs(b - a) for a, b in pairwise(counted)} <= {1}
    assert min(counted) >= 0


@given(SEEDS)
def test_repeated_words_occur_in_the_question(seed: int) -> None:
    for make in (tasks.say, tasks.choose):
        task = make(Random(seed))
        assert task.answer in task.question


def test_training_tasks_are_never_held_out(held_out: dict[str, list[TinyTask]]) -> None:
    measured = {task.question for some in held_out.values() for task in some}

    @given(SEEDS)
    def check(seed: int) -> None:
        rng = Random(seed)
        assert not tasks.draw_task(rng)[1].is_held_out
        for message in recipe.sft_row(rng)["conversations"][::2]:
            assert message["content"] not in measured

    check()


def test_every_family_has_held_out_tasks(held_out: dict[str, list[TinyTask]]) -> None:
    assert list(held_out) == list(FAMILIES)
    for family, found in held_out.items():
        assert found, family
        assert all(task.is_held_out for task in found)
        assert len({task.question for task in found}) == len(found)
    assert recipe.held_out_tasks(7, 12) == held_out


def test_open_families_hold_out_a_task_in_every_wording() -> None:
    one, two = (TinyTask(f"{verb} tumi.", "tumi", "say tumi") for verb in ("Say", "Echo"))
    assert one.is_held_out == two.is_held_out


def test_opposites_are_consistent() -> None:
    both = [*tasks.OPPOSITES, *tasks.OPPOSITES.values()]
    assert len(both) == len(set(both))
