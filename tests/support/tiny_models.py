"""Tiny models of real architectures with seeded weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tinkex.nn.hosted_model import HostedModel

VOCAB_SIZE = 211


def tiny_qwen3(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers; `overrides` are fields of its config."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,  # wide enough that tokens differ
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    config = Qwen3Config(**(fields | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    return model.to(dtype).eval()


def tiny_host(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> HostedModel:
    """The same model, hosted."""
    return HostedModel(tiny_qwen3(seed=seed, dtype=dtype, **overrides))
