"""Models with random weights, and the number of repeats on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

RANK = 32
THREADS = 2
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Numbers of repeats; a repeat is one turn of ours between two of the baseline."""

    training_repeats: int
    sft_batches: int
    """Batches of 8 per repeat."""
    adapter_repeats: int
    sampling_repeats: int
    is_arrival_split: bool = False
    """Whether the baseline answers half of the requests before ours and half after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model to measure."""

    name: str
    about: str
    make: Callable[[], Any]
    vocab_size: int
    effort: Effort


def _qwen3(**sizes: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **_SHARED))


def _llama(**sizes: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**sizes, **_SHARED))


#: Without an end token, both sides always sample the requested number of tokens.
_SHARED: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

_SMALL_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SMALL = Shape(
    name="26M",
    about="Qwen3, hidden 512, 8 layers, 8 heads, 4 key heads, intermediate 1536, vocabulary 8192",
    make=lambda: _qwen3(vocab_size=8192, **_SMALL_SIZES),
    vocab_size=8192,
    effort=Effort(training_repeats=2, sft_batches=2, adapter_repeats=4, sampling_repeats=2),
)
LARGE = Shape(
    name="135M",
    about="Llama, hidden 576, 30 layers, 9 heads, 3 key heads, intermediate 1536, "
    "vocabulary 49152 (the shape of SmolLM2-135M)",
    make=lambda: _llama(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    ),
    vocab_size=49152,
    effort=Effort(
        training_repeats=1,
        sft_batches=1,
        adapter_repeats=1,
        sampling_repeats=1,
        is_arrival_split=True,
    ),
)
QUICK = replace(
    SMALL,
    effort=Effort(
        training_repeats=1,
        sft_batches=1,
        adapter_repeats=2,
        sampling_repeats=1,
        is_arrival_split=True,
    ),
)
WIDE = replace(SMALL, vocab_size=49152, make=lambda: _qwen3(vocab_size=49152, **_SMALL_SIZES))


def write_model(shape: Shape, folder: Path) -> Path:
    """Save a model with fixed random weights in the transformers format."""
    torch.manual_seed(0)
    model = shape.make().eval()
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    return folder
