"""Eval metrics, compared with direct computations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.integration.pipeline.stage_inputs import (
    make_stage_inputs,
    make_tokenizer,
    tiny_model,
    write_rows,
    write_samples,
)
from tinkex.pipeline.forward import PackedForward
from tinkex.pipeline.stages import DistillStage, DpoStage, SftStage
from tinkex.pipeline.token_file import Document, TokenFile, open_token_file
from tinkex.pipeline.tokenizer import TextTokenizer
from tinkex.pipeline.train.evaluation import (
    EvalPrompt,
    _generate,
    eval_prompts,
    extract_answer,
    preference_metrics,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_samples(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Path]) -> TextTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "made", list(data.values()))


def test_eval_loss_is_a_mean_over_tokens(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    stage = SftStage(make_stage_inputs("sft", tmp_path, data["sft"], tokenizer))
    file = stage.inputs.train.file
    total, num_counted = 0.0, 0
    theirs: Any = stage.model
    for row in range(file.num_rows):
        document = file.document(row)
        with torch.no_grad():
            logits = theirs(torch.tensor([document.ids[:-1]])).logits[0]
        each = cross_entropy(logits, torch.tensor(document.ids[1:]), reduction="none")
        counted = torch.tensor(document.learned[1:])
        total += each[counted].sum().item()
        num_counted += int(counted.sum())
    found = stage.evaluate()
    assert found["loss"] == pytest.approx(total / num_counted, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_preference_accuracy_is_a_fraction_of_pairs(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    setting = make_stage_inputs("dpo", tmp_path, data["dpo"], tokenizer)
    stage = DpoStage(setting, tiny_model(tokenizer, seed=5))
    found = stage.evaluate()
    swapped = preference_metrics(
        stage.reference, stage.forward, stage.held_out, setting.settings.beta
    )
    # Each pair is won by one of the two models.
    assert found["preference_accuracy"] + swapped["preference_accuracy"] == pytest.approx(1.0)
    assert found["margin"] == pytest.approx(-swapped["margin"], rel=1e-4)
    num_pairs = len(setting.train.rows)
    assert (found["preference_accuracy"] * num_pairs) % 0.5 == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think><answer>7</answer>", "7"),
        ("<answer> 7\n</answer>", "7"),
        ("<think>no</think> yes  it is", "yes it is"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("plain", "plain"),
        ("<answer>7", "<answer>7"),
        ("", ""),
    ],
)
def test_extract_answer(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


def test_eval_prompt_is_the_last_turn(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    turns = ["1", "2", "3", "<think>x</think><answer>4</answer>"]
    roles = ["user", "assistant"] * 2
    row = {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]}
    path = write_rows(tmp_path / "a.jsonl", [row])
    file = open_token_file(path, tokenizer, "r1", tmp_path)
    (case,) = eval_prompts(file, np.arange(1), tokenizer, 96)
    prompt = tokenizer.decode(case.prompt)
    assert prompt.endswith("<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n")
    assert case.answer == "4"
    assert eval_prompts(file, np.arange(1), tokenizer, 5) == []


def test_eval_prompt_is_the_last_assistant_turn(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    turns = [("user", "1"), ("assistant", "<think>x</think><answer>2</answer>"), ("user", "ok")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    path = write_rows(tmp_path / "a.jsonl", [row])
    file = open_token_file(path, tokenizer, "r1", tmp_path)
    (case,) = eval_prompts(file, np.arange(1), tokenizer, 96)
    assert tokenizer.decode(case.prompt).endswith("1<|im_end|>\n<|im_start|>assistant\n")
    assert case.answer == "2"
    # Without an assistant turn there is no prompt.
    silent = SimpleNamespace(document=lambda row: Document([1, 2], [False, False]))
    assert eval_prompts(cast(TokenFile, silent), np.arange(1), tokenizer, 96) == []


def test_exact_match_of_a_trained_and_an_untrained_model(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    rows = [
        {"question": f"{n}?", "answer": f"<think>{n}</think><answer>{n}{n}</answer>"}
        for n in range(4)
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    stage = DistillStage(make_stage_inputs("r1", tmp_path, path, tokenizer), None)
    assert stage.evaluate()["exact_match"] == 0.0
    optimizer = torch.optim.AdamW(stage.model.parameters(), lr=1e-2)
    for number in range(150):
        loss = stage.loss(stage.source.batch(number, 0))
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert stage.evaluate()["exact_match"] == 1.0
    assert stage.model.training


def written(
    model: Any,
    tokenizer: TextTokenizer,
    cases: Sequence[EvalPrompt],
    among: Sequence[EvalPrompt] = (),
) -> list[str]:
    """What a model writes; as long as it may write `among` others."""
    longest = max(case.num_tokens for case in (*cases, *among))
    with torch.no_grad():
        return _generate(model, tokenizer, [replace(case, num_tokens=longest) for case in cases])


def test_padding_does_not_change_an_answer(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    stage = DistillStage(make_stage_inputs("r1", tmp_path, data["r1"], tokenizer), None)
    cases = stage._eval_prompts[:6]
    assert len({len(case.prompt) for case in cases}) > 1
    together = written(stage.model, tokenizer, cases)
    alone = [text for case in cases for text in written(stage.model, tokenizer, [case], cases)]
    assert together == alone
    assert any(together)


def test_evaluation_has_no_side_effects(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    stage = DistillStage(make_stage_inputs("r1", tmp_path, data["r1"], tokenizer), None)
    before = torch.get_rng_state()
    first, second = stage.evaluate(), stage.evaluate()
    assert first == second
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in stage.model.parameters())
    assert isinstance(stage.forward, PackedForward)
