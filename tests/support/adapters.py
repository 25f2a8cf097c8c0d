"""Adapters with synthetic weights on tiny models of several architectures."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tinkex.engine.adapters import AdapterState, layout_for
from tinkex.engine.protocol import AdapterSpec, lora_scale
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.hosted_model import HostedModel
from tinkex.nn.lora_layout import LoraLayout, LoraTarget, TargetKind
from tinkex.nn.lora_training import LoraSegment, SegmentedLora
from tinkex.nn.packed_attention import PackedAttention

BASE = "tiny/model"
VOCAB_SIZE = 101
TOKENS = torch.tensor([5, 17, 99, 3, 3, 42, 0, 61, 88, 7, 23])

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,  # wide enough that every part of the model matters
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_KINDS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {"intermediate_size": 48, "head_dim": 8}),
    "qwen2": (Qwen2Config, {"intermediate_size": 48}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
    ),
    "mixtral": (MixtralConfig, {"intermediate_size": 24, "num_local_experts": 4}),
    "gpt_oss": (
        GptOssConfig,
        {
            "intermediate_size": 24,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


def make_model(kind: str, *, tied: bool = False, **overrides: Any) -> PreTrainedModel:
    """A tiny model with seeded weights; biases are not zero."""
    config_class, fields = _KINDS[kind]
    config = config_class(**(_SHAPE | fields | overrides), tie_word_embeddings=tied)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, 0.0, 0.1)
    return model.eval()  # type: ignore[no-any-return]


def make_spec(rank: int = 4, **overrides: Any) -> AdapterSpec:
    """An adapter of all modules by default."""
    return AdapterSpec(base_model=BASE, rank=rank, seed=7, **overrides)


def sites_of(model: PreTrainedModel) -> list[LoraTarget]:
    """A LoRA target for every linear layer and expert parameter, as in the hosted model."""
    sites = []
    for path, module in model.named_modules():
        part = TargetKind.ATTENTION if "attn" in path else TargetKind.MLP
        part = TargetKind.UNEMBED if module is model.get_output_embeddings() else part
        if isinstance(module, nn.Linear) and not path.endswith(("router", "_gate")):
            sizes = {"in_features": module.in_features, "out_features": (module.out_features,)}
            sites.append(LoraTarget(kind=part, paths=(path,), **sizes))
        tables = {name: x for name, x in module.named_parameters(recurse=False) if x.ndim == 3}
        for name, table in tables.items():
            num_experts, size_out, size_in = table.shape
            if getattr(module, "is_transposed", False):
                size_out, size_in = size_in, size_out
            sizes = {"in_features": size_in, "out_features": (size_out,)}
            sites.append(
                LoraTarget(kind=part, paths=(f"{path}.{name}",), num_experts=num_experts, **sizes)
            )
    return sites


def make_layout(sites: Sequence[LoraTarget], spec: AdapterSpec) -> LoraLayout:
    """The buffer layout of such an adapter."""
    return layout_for(sites, spec)


def make_state(layout: LoraLayout, *, with_gradient: bool = False) -> AdapterState:
    """The state of a trained adapter in which every value is distinct."""
    buffers = []
    for seed in range(4):
        rng, flat = torch.Generator().manual_seed(seed), torch.zeros(layout.size)
        for pair in layout.pairs(flat):
            pair.down.normal_(0.0, 0.3, generator=rng)
            pair.up.normal_(0.0, 0.01 * layout.rank**0.5, generator=rng)
        buffers.append(flat)
    weights, first, second, gradient = buffers
    return AdapterState(
        weights=weights,
        first=first,
        second=second.square_(),
        num_steps=3,
        gradient=gradient if with_gradient else None,
    )


@torch.no_grad()
def hosted_logprobs(
    host: HostedModel, layout: LoraLayout, weights: Tensor, scale: float | None = None
) -> Tensor:
    """The log-probabilities of the hosted model with an adapter; alpha is 32 by default."""
    scale = lora_scale(32, layout.rank, use_rslora=False) if scale is None else scale
    rows = SegmentedLora([LoraSegment(0, len(TOKENS), scale, layout.views(weights))])
    this = ForwardContext(rows, PackedAttention([len(TOKENS)]))
    hidden = host.hidden_states(TOKENS, torch.arange(len(TOKENS)), this)
    logits, _ = host.lm_head.logits(hidden, rows)
    return logits.log_softmax(-1)


@torch.no_grad()
def plain_logprobs(model: nn.Module) -> Tensor:
    """The log-probabilities of transformers or PEFT for the same tokens."""
    logits: Tensor = model(input_ids=TOKENS.unsqueeze(0), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def load_peft(model: PreTrainedModel, folder: Path) -> nn.Module:
    """Load a folder's adapter with PEFT."""
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT warns about merging tied heads, which is not done here.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        return PeftModel.from_pretrained(model, folder).eval()  # type: ignore[no-any-return]


def load_plain(folder: Path) -> PreTrainedModel:
    """Load a model folder with transformers; no tensor may be missing."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        assert not report[problem], (problem, report[problem])
    return model.eval()  # type: ignore[no-any-return]


def adapted(layout: LoraLayout) -> Collection[str]:
    """The module paths that an adapter has pairs for."""
    return [pair.path for pair in layout.pairs(torch.zeros(layout.size))]
