"""DPO with Muon does not destroy the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tinkex.data import chatml
from tinkex.models import TINY_FOLDER
from tinkex.pipeline import tokenizer
from tinkex.pipeline.entry import main
from tinkex.pipeline.model import load_model
from tinkex.pipeline.tiny import recipe
from tinkex.pipeline.tiny.tasks import TinyTask
from tinkex.pipeline.train.evaluation import EvalPrompt, exact_match

#: Those that the model of the package answers without fail, and that go first if it is hurt.
FAMILIES = ("greet", "unknown", "sound", "opposite")


def share_right(folder: Path, tasks: Sequence[TinyTask]) -> float:
    text = tokenizer.load_tokenizer(folder)
    prompts = [chatml.render_prompt([{"role": "user", "content": task.question}]) for task in tasks]
    cases = [
        EvalPrompt(tuple(ids), task.answer, 16)
        for ids, task in zip(text.encode_batch(prompts), tasks, strict=True)
    ]
    return exact_match(load_model(folder), text, cases)


@pytest.mark.usefixtures("capsys")
def test_dpo_with_muon_improves_preferences_and_keeps_accuracy(tmp_path: Path) -> None:
    data = recipe.write_rows(tmp_path, 5, {"dpo": 200})["dpo"]
    options = ("--out_dir", str(tmp_path / "dpo"), "--data_path", str(data))
    parent = ("--init_from", str(TINY_FOLDER), "--tokenizer_dir", str(TINY_FOLDER))
    sizes = ("--max_seq_len", "256", "--max_steps", "30", "--save_interval", "0")
    assert main("dpo", [*options, *parent, *sizes, "--optimizer", "muon"]) == 0
    held_out = recipe.held_out_tasks(5, 10)
    tasks = [task for family in FAMILIES for task in held_out[family]]
    before, after = (share_right(folder, tasks) for folder in (TINY_FOLDER, tmp_path / "dpo/hf"))
    assert after >= before - 0.05
    moved = json.loads((tmp_path / "dpo" / "result.json").read_text())["metrics"]
    assert moved["preference_accuracy"]["after"] > moved["preference_accuracy"]["before"]
