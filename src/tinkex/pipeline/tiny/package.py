"""The last step of tinkex/tiny: half the size, measured as it ships, with its card beside it."""

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

#: What the model folder of a stage has; the weights are written anew.
_COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CARD_FILE = "README.md"


def write_package(
    trained: Path, out: Path, eval_tasks: Mapping[str, Sequence[TinyTask]], steps: int
) -> ModelCardMetrics:
    """Write the folder that ships, whole or not at all; returns what its card says."""
    # Its bars would break into our lines.
    transformers_log.disable_progress_bar()
    model = load_model(trained)
    text = tokenizer.load_tokenizer(trained)
    # Rounded first: what is measured is what ships.
    model.to(torch.float16)  # type: ignore[arg-type]
    with new_directory(out) as scratch:
        model.save_pretrained(scratch)
        for name in _COPIED_FILES:
            shutil.copyfile(trained / name, scratch / name)
        model.to(torch.float32)  # type: ignore[arg-type]
        figures = ModelCardMetrics(
            num_parameters=sum(weight.numel() for weight in model.parameters()),
            vocab_size=text.vocab_size,
            num_steps=steps,
            context=int(model.config.max_position_embeddings),
            num_tasks={family: len(some) for family, some in eval_tasks.items()},
            shares={
                family: exact_match(model, text, [_eval_prompt(task, text) for task in some])
                for family, some in eval_tasks.items()
            },
        )
        (scratch / CARD_FILE).write_text(make_card(figures), encoding="utf-8")
        for path in scratch.iterdir():
            path.chmod(0o644)
    out.chmod(0o755)
    return figures


def _eval_prompt(task: TinyTask, text: tokenizer.TextTokenizer) -> EvalPrompt:
    asked = chatml.render_prompt([{"role": "user", "content": task.question}])
    prompt, answer = text.encode_batch([asked, task.answer])
    return EvalPrompt(tuple(prompt), task.answer, len(answer) + 1)
