"""Package tinkex/tiny: float16 weights, evaluation and model card."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers.utils import logging as transformers_log

from tinkex.data import chatml
from tinkex.pipeline import tokenizer
from tinkex.pipeline.model import load_model
from tinkex.pipeline.tiny.model_card import ModelCardMetrics, make_card
from tinkex.pipeline.tiny.tasks import TinyTask
from tinkex.pipeline.train.evaluation import EvalPrompt, exact_match
from tinkex.system.atomic import new_directory

#: Files copied from the trained folder; the weights are written in float16.
_COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CARD_FILE = "README.md"


def write_package(
    trained: Path, out: Path, eval_tasks: Mapping[str, Sequence[TinyTask]], steps: int
) -> ModelCardMetrics:
    """Write the packaged model folder atomically; returns the metrics of its card."""
    # Progress bars of transformers would garble the output.
    transformers_log.disable_progress_bar()
    model = load_model(trained)
    text = tokenizer.load_tokenizer(trained)
    # Round first, so that the packaged weights are evaluated.
    model.to(torch.float16)  # type: ignore[arg-type]
    with new_directory(out) as scratch:
        model.save_pretrained(scratch)
        for name in _COPIED_FILES:
            shutil.copyfile(trained / name, scratch / name)
        model.to(torch.float32)  # type: ignore[arg-type]
        metrics = ModelCardMetrics(
            num_parameters=sum(weight.numel() for weight in model.parameters()),
            vocab_size=text.vocab_size,
            num_steps=steps,
            context=int(model.config.max_position_embeddings),
            num_tasks={family: len(tasks) for family, tasks in eval_tasks.items()},
            shares={
                family: exact_match(model, text, [_eval_prompt(task, text) for task in tasks])
                for family, tasks in eval_tasks.items()
            },
        )
        (scratch / CARD_FILE).write_text(make_card(metrics), encoding="utf-8")
        for path in scratch.iterdir():
            path.chmod(0o644)
    out.chmod(0o755)
    return metrics


def _eval_prompt(task: TinyTask, text: tokenizer.TextTokenizer) -> EvalPrompt:
    text_prompt = chatml.render_prompt([{"role": "user", "content": task.question}])
    prompt, answer = text.encode_batch([text_prompt, task.answer])
    return EvalPrompt(tuple(prompt), task.answer, len(answer) + 1)
