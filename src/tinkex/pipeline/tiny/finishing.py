"""The last step of tinkex/tiny: half the size, measured as it ships, with its card beside it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers.utils import logging as transformers_log

from tinkex.checkpoint.atomic import new_directory
from tinkex.pipeline import chat, tokenizer
from tinkex.pipeline.evaluation import Case, exact_match
from tinkex.pipeline.model import load_model
from tinkex.pipeline.tiny.card import Figures, make_card
from tinkex.pipeline.tiny.tasks import Task

#: What the model folder of a stage has; the weights are written anew.
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CARD = "README.md"


def finish(trained: Path, out: Path, tasks: Mapping[str, Sequence[Task]], steps: int) -> Figures:
    """Write the folder that ships, whole or not at all; returns what its card says."""
    # Its bars would break into our lines.
    transformers_log.disable_progress_bar()
    model = load_model(trained)
    text = tokenizer.load(trained)
    # Rounded first: what is measured is what ships.
    model.to(torch.float16)  # type: ignore[arg-type]
    with new_directory(out) as scratch:
        model.save_pretrained(scratch)
        for name in _COPIED:
            shutil.copyfile(trained / name, scratch / name)
        model.to(torch.float32)  # type: ignore[arg-type]
        figures = Figures(
            num_parameters=sum(weight.numel() for weight in model.parameters()),
            vocab_size=text.vocab_size,
            num_steps=steps,
            context=int(model.config.max_position_embeddings),
            num_tasks={family: len(some) for family, some in tasks.items()},
            shares={
                family: exact_match(model, text, [_case(task, text) for task in some])
                for family, some in tasks.items()
            },
        )
        (scratch / CARD).write_text(make_card(figures), encoding="utf-8")
        for path in scratch.iterdir():
            path.chmod(0o644)
    out.chmod(0o755)
    return figures


def _case(task: Task, text: tokenizer.TextTokenizer) -> Case:
    asked = chat.prompt([{"role": "user", "content": task.question}])
    prompt, answer = text.encode_all([asked, task.answer])
    return Case(tuple(prompt), task.answer, len(answer) + 1)
