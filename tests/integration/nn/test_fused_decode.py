from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.integration.nn.architectures import build
from tests.support.tiny_models import VOCAB_SIZE, tiny_host
from tinkex.engine.sampling.request_state import SamplerAdapter
from tinkex.nn import fused_decode
from tinkex.nn.cached_attention import AttentionSegment, CachedAttention, DecodeRows, PrefillRows
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.fused_decode import FusedDecoder
from tinkex.nn.hosted_model import HostedModel
from tinkex.nn.kv_cache import KVBlock, KVCacheSpec, KVShape, PromptKV
from tinkex.nn.lora_decode import AdapterSpan, DecodeLora
from tinkex.nn.lora_layout import LoraPair

SPEC = KVCacheSpec([KVShape(2, 16, 16)] * 2, torch.float32, torch.device("cpu"))
CAPACITY = 80
#: Sequences of two blocks, and the slot of each row.
LENGTHS = [np.array([0, 70, 3]), np.array([20, 9])]
ORDER = torch.tensor([3, 0, 1, 4, 2])


@dataclass
class Steps:
    """Numbers of rows of the fused steps."""

    num_rows: list[int]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps([])
    real = FusedDecoder.hidden_states

    def hidden(self: FusedDecoder, *args: Any) -> Tensor | None:
        found = real(self, *args)
        if found is not None:
            steps.num_rows.append(len(found))
        return found

    monkeypatch.setattr(FusedDecoder, "hidden_states", hidden)
    return steps


def adapter(
    host: HostedModel, seed: int, rank: int, skipped_index: int | None = None
) -> SamplerAdapter:
    rng = torch.Generator().manual_seed(seed)
    pairs = [
        LoraPair(
            torch.randn(len(target.paths) * rank, target.in_features, generator=rng) * 0.2,
            tuple(torch.randn(size, rank, generator=rng) for size in target.out_features),
        )
        for target in host.lora_targets
    ]
    weights = [None if number == skipped_index else pair for number, pair in enumerate(pairs)]
    return SamplerAdapter(seed, 0.5, weights)


def filled_blocks() -> list[KVBlock]:
    rng = torch.Generator().manual_seed(7)
    blocks = [KVBlock(SPEC, len(lengths), CAPACITY) for lengths in LENGTHS]
    for block in blocks:
        for one in block.keys + block.values:
            one.normal_(generator=rng)
    return blocks


def run(
    host: HostedModel, lora: DecodeLora, extra_segments: list[AttentionSegment] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return the hidden states of a step, and the KV cache after it."""
    blocks = filled_blocks()
    segments: list[AttentionSegment] = [
        DecodeRows(*pair) for pair in zip(blocks, LENGTHS, strict=True)
    ]
    positions = np.concatenate(LENGTHS)[ORDER.numpy()]
    num_extra = sum(segment.num_rows for segment in extra_segments or [])
    positions = np.concatenate([positions, np.arange(num_extra)])
    with torch.no_grad():
        hidden = host.hidden_states(
            torch.arange(len(positions)) * 7 % VOCAB_SIZE,
            torch.from_numpy(positions),
            ForwardContext(lora, CachedAttention([*segments, *(extra_segments or [])], ORDER)),
        )
    return hidden, [one for block in blocks for one in block.keys + block.values]


@pytest.mark.parametrize(
    "overrides",
    [{}, {"attention_bias": True}, {"use_sliding_window": True, "sliding_window": 8}],
    ids=["plain", "bias", "window"],
)
def test_fused_step_equals_layers(
    steps: Steps, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sliding_window" in overrides:
        overrides = {**overrides, "layer_types": ["sliding_attention", "full_attention"]}
    host = tiny_host(**overrides)
    lora = DecodeLora(
        [
            AdapterSpan(0, 2, adapter(host, 1, 4)),
            AdapterSpan(3, 5, adapter(host, 2, 20, skipped_index=1)),
        ]
    )
    hidden, cache = run(host, lora)
    assert steps.num_rows[-1] == 5
    monkeypatch.setattr(FusedDecoder, "hidden_states", lambda self, *args: None)
    expected, expected_cache = run(host, lora)
    assert torch.equal(hidden, expected)
    assert all(map(torch.equal, cache, expected_cache))
    base, _ = run(host, DecodeLora([]))
    assert torch.equal(hidden[2], base[2]), "a row without an adapter uses the base model"
    assert not torch.allclose(hidden[0], base[0])


def test_decode_is_unchanged_by_concurrent_prefill(steps: Steps) -> None:
    host = tiny_host()
    alone, _ = run(host, DecodeLora([]))
    assert steps.num_rows[-1] == 5
    num_before = len(steps.num_rows)
    together, _ = run(host, DecodeLora([]), [PrefillRows(PromptKV(SPEC, 6), 0, 6)])
    assert len(steps.num_rows) == num_before, "prefill runs layer by layer"
    assert torch.equal(alone, together[:5])


def test_shared_prompt_uses_layer_path(steps: Steps) -> None:
    host = tiny_host()
    num_before = len(steps.num_rows)
    prompt, (block, _) = PromptKV(SPEC, 4), filled_blocks()
    for one in prompt.keys + prompt.values:
        one.zero_()
    segment = DecodeRows(block, LENGTHS[0], prompt)
    with torch.no_grad():
        host.hidden_states(
            torch.arange(3),
            torch.from_numpy(LENGTHS[0] + 4),
            ForwardContext(DecodeLora([]), CachedAttention([segment])),
        )
    assert len(steps.num_rows) == num_before


@pytest.mark.parametrize("name", ["gemma2", "granite", "qwen3_moe", "gpt2"])
def test_custom_layers_use_layer_path(steps: Steps, name: str) -> None:
    HostedModel(build(name))
    assert not steps.num_rows or name == "granite", "granite's layers only look standard"


def test_fused_decode_is_used_only_if_equivalent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = []
    real = fused_decode.matches_reference

    def recorded(*args: Any) -> bool:
        outcomes.append(real(*args))
        return outcomes[-1]

    monkeypatch.setattr("tinkex.nn.hosted_model.matches_reference", recorded)
    tiny_host()
    HostedModel(build("granite", hidden_size=64, intermediate_size=96))
    assert outcomes == [True, False], "granite scales the residual"


def test_low_precision_uses_torch(steps: Steps) -> None:
    tiny_host(dtype=torch.bfloat16)
    assert not steps.num_rows


def test_positions_beyond_rotary_table(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkex.nn.ops.rotary._FIRST_POSITIONS", 4)
    few, _ = run(tiny_host(), DecodeLora([]))
    monkeypatch.setattr("tinkex.nn.ops.rotary._FIRST_POSITIONS", 512)
    many, _ = run(tiny_host(), DecodeLora([]))
    assert torch.equal(few, many)
