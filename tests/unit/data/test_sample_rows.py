"""Generated sample data: reproducible, correct and parseable."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tinkex.data import sample_rows
from tinkex.data.jsonl import parse_line, read_lines
from tinkex.data.rows import STAGE_PARSERS
from tinkex.data.sample_rows import CHATTER
from tinkex.errors import InvalidInput

SMALL = {"pretrain": 60, "sft": 60, "dpo": 60, "r1": 60}


def test_sample_rows_parse_and_are_unique(tmp_path: Path) -> None:
    for stage, path in sample_rows.write_sample_files(tmp_path, 1, SMALL).items():
        lines = list(read_lines(path))
        assert len({line.content for line in lines}) == len(lines) == 60
        for line in lines:
            parse_line(path, line, STAGE_PARSERS[stage])


def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    a, b, c = (
        sample_rows.write_sample_files(tmp_path / str(i), seed, SMALL)
        for i, seed in enumerate((1, 1, 2))
    )
    for stage in SMALL:
        assert a[stage].read_bytes() == b[stage].read_bytes() != c[stage].read_bytes()


def test_sums_and_comparisons_are_correct(tmp_path: Path) -> None:
    path = sample_rows.write_sample_files(tmp_path, 1, {"r1": 300})["r1"]
    num_checked = 0
    for line in read_lines(path):
        ask, say = json.loads(line.content)["conversations"]
        numbers = [int(found) for found in re.findall(r"\d+", ask["content"])]
        answer = re.fullmatch(r"<think>.+</think><answer>(.+)</answer>", say["content"])
        assert answer is not None
        if len(numbers) == 2:
            is_largest = re.search("larger|maximum", ask["content"])
            assert int(answer[1]) == (max(numbers) if is_largest else sum(numbers))
            num_checked += 1
    assert num_checked > 100


def test_dpo_prefers_the_answer_that_is_rarer_in_sft(tmp_path: Path) -> None:
    files = sample_rows.write_sample_files(tmp_path, 1, {"sft": 300, "dpo": 300})
    talks = [json.loads(line.content)["conversations"] for line in read_lines(files["sft"])]
    is_chatty = [talk[1]["content"].endswith(CHATTER) for talk in talks]
    assert 0.5 < sum(is_chatty) / len(is_chatty) < 0.7
    for line in read_lines(files["dpo"]):
        pair = json.loads(line.content)
        question, chosen = pair["chosen"]
        # Both answers are correct, so knowledge cannot decide between them.
        other = {**chosen, "content": f"{chosen['content']} {CHATTER}"}
        assert pair["rejected"] == [question, other]


def test_unknown_stage_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'ppo'"):
        sample_rows.write_sample_files(tmp_path, 1, {"ppo": 3})
