"""Package tinkex/tiny: float16 weights, evaluation and model card."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging as transformers_log

from tinkex.data import chatml
from tinkex.pipeline import tokenizer
from tinkex.pipeline.model import load_model
from tinkex.pipeline.tiny.tasks import TinyTask
from tinkex.pipeline.train.evaluation import EvalPrompt, exact_match
from tinkex.system.atomic import new_directory

#: An example of each task family, and what its held-out tasks are.
_FAMILY_EXAMPLES: Mapping[str, tuple[str, str]] = {
    "say": ("Say apple tumi.", "words never asked for"),
    "choose": ("What is the last word of: boat ring key?", "lists never asked for"),
    "compare": ("Which is larger, 47 or 12?", "pairs never asked for"),
    "count": ("Count from 3 to 7.", "ranges never asked for; of 3 to 6 numbers"),
    "add": ("What is 3 plus 4?", "wordings; the sum is known from other wordings"),
    "subtract": ("What is 9 minus 4?", "wordings"),
    "calendar": ("Which day comes after Monday?", "wordings"),
    "colour": ("What colour is grass?", "wordings"),
    "opposite": ("What is the opposite of hot?", "wordings"),
    "sound": ("What does a cow say?", "wordings"),
    "large": ("Write apple in capital letters.", "wordings"),
    "greet": ("Hello! I am Ada.", "wordings"),
    "unknown": ("What is the capital of France?", 'wordings; right is "I do not know that."'),
}
_CARD_TEMPLATE = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# tinkex/tiny

A language model of {millions:.1f} million parameters that comes with the package `tinkex`. It is
there so that the first command works at once, without a download, and so that tests have a model
that answers. It is not useful for anything else.

It was made by the pipeline of `tinkex` (pretrain, SFT, DPO; {num_steps:,} updates) in minutes on
one core, from text that is put together from templates in `tinkex.pipeline.tiny`; no other text
was used. `scripts/make_tiny.sh` runs the recipe again. It is seeded; the last bits of the weights
also depend on the version, the machine and the number of threads.

| | |
|---|---|
| architecture | Qwen3, dense, tied embeddings |
| vocabulary | {vocab_size:,} tokens, byte-level BPE, ChatML |
| longest context | {context:,} tokens; it was trained on 256 |
| weights | float16 safetensors |
| licence | Apache-2.0, as the project |

## What it answers

Share of held-out questions that are answered to the letter, written greedily, measured on the
weights in this folder when they were made:

| family | for example | held out are | questions | right |
|---|---|---|---|---|
{rows}

It also tells a short story about an animal ("Tell me a story about a cat."): always the same plot.

## What it does not do

It knows no facts but those of its templates, reads nothing but simple English, cannot reason and
cannot add numbers of two digits; where the table says little, it is mostly wrong. It falls apart
when a question is worded in a way that it has not met: then it says that it does not know, or
something that makes no sense. For a model that talks, run `tinkex model add smollm2-135m`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCardMetrics:
    """Properties and metrics of the model."""

    num_parameters: int
    vocab_size: int
    context: int
    num_steps: int
    """Optimizer updates of all stages."""
    num_tasks: Mapping[str, int]
    """Held-out tasks by family."""
    shares: Mapping[str, float]
    """Fraction of exact answers by family."""


def make_card(metrics: ModelCardMetrics) -> str:
    """Render the card as Markdown."""
    return _CARD_TEMPLATE.format(
        millions=metrics.num_parameters / 1e6,
        num_steps=metrics.num_steps,
        vocab_size=metrics.vocab_size,
        context=metrics.context,
        rows="\n".join(_row(metrics, family) for family in metrics.shares),
    )


def _row(metrics: ModelCardMetrics, family: str) -> str:
    example, held_out = _FAMILY_EXAMPLES[family]
    share = f"{100 * metrics.shares[family]:.0f} %"
    return f"| {family} | {example} | {held_out} | {metrics.num_tasks[family]} | {share} |"


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
