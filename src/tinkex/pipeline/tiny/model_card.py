"""The model card of tinkex/tiny."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
