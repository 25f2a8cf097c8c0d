"""The longer run, in its quick form: every stage, both tables, nothing measured that was seen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
#: Half a minute is enough on a machine that does nothing else; it only says that nothing hangs.
TIMEOUT_SECONDS = 600.0
KINDS = ("chain_sum", "spell_backward", "letter_counting")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a quick run, and what it printed."""
    work = tmp_path_factory.mktemp("made")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "from_nothing.py"), "--quick", "--work", str(work)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=work,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return work, done.stdout


def test_summary_lists_each_stage_with_its_metric(made: tuple[Path, str]) -> None:
    _, text = made
    for stage, metric in {
        "pretrain": "loss",
        "sft": "loss",
        "dpo": "preference_accuracy",
        "r1": "exact_match",
    }.items():
        assert re.search(rf"^{stage} +trained +{metric} +[\d.]+ +[\d.]+ ", text, re.MULTILINE)


def test_summary_lists_scores_of_each_kind_of_task(made: tuple[Path, str]) -> None:
    _, text = made
    for kind in KINDS:
        assert re.search(rf"^{kind} .* 2( +\d+ %){{3}}$", text, re.MULTILINE)


def test_held_out_tasks_are_not_in_the_training_data(made: tuple[Path, str]) -> None:
    data = made[0] / "data"
    held_out = questions(data / "r1_held_out.jsonl")
    assert len(held_out) == 2 * len(KINDS)
    assert not held_out & (questions(data / "r1.jsonl") | questions(data / "sft.jsonl"))
    record = json.loads((made[0] / "out" / "r1" / "stage.json").read_text())
    assert record["config"]["eval_data_path"] == str(data / "r1_held_out.jsonl")


def questions(path: Path) -> set[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {said["content"] for row in rows for said in row["conversations"][::2]}
