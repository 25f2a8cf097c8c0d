"""Small models of every supported architecture, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 131
#: Shorter than the sequences of the tests.
WINDOW = 6

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": False}
_LAYER_TYPES = ["sliding_attention", "full_attention"]

#: Config class and the fields that differ from the common ones.
ARCHITECTURES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {}),
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (LlamaConfig, {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW, "head_dim": 12}),
    "gemma": (GemmaConfig, {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _LAYER_TYPES,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _LAYER_TYPES,
            "query_pre_attn_scalar": 24,
        },
    ),
    "phi3": (Phi3Config, {"sliding_window": WINDOW}),
    "gpt2": (GPT2Config, {"tie_word_embeddings": True}),
    "olmo2": (Olmo2Config, {}),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere": (CohereConfig, {"use_qk_norm": True, "logit_scale": 0.5}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            **_EXPERTS,
            "head_dim": 16,
            "num_experts": 5,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (MixtralConfig, {**_EXPERTS, "num_local_experts": 4, "sliding_window": WINDOW}),
}
WITH_EXPERTS = ("qwen3_moe", "mixtral")


def build(name: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """Build a model of an architecture; biases and norms are random too."""
    kind, special = ARCHITECTURES[name]
    return build_of(kind, special | overrides, dtype)


def build_of(
    kind: type[Any], fields: dict[str, Any], dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build a model from a config class."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(kind(**(_COMMON | fields)))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    assert isinstance(model, PreTrainedModel)
    return model.to(dtype).eval()
