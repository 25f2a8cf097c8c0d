"""A step in one call says what the layers say one by one, to the bit, or is not taken."""

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

KIND = KVCacheSpec([KVShape(2, 16, 16)] * 2, torch.float32, torch.device("cpu"))
CAPACITY = 80
#: Samples of two blocks, and which of the blocks' slots each row is.
LENGTHS = [np.array([0, 70, 3]), np.array([20, 9])]
ORDER = torch.tensor([3, 0, 1, 4, 2])


@dataclass
class Steps:
    """Which steps were taken in one call."""

    num_rows: list[int]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    seen = Steps([])
    real = FusedDecoder.hidden_states

    def hidden(self: FusedDecoder, *args: Any) -> Tensor | None:
        found = real(self, *args)
        if found is not None:
            seen.num_rows.append(len(found))
        return found

    monkeypatch.setattr(FusedDecoder, "hidden_states", hidden)
    return seen


def adapter(host: HostedModel, seed: int, rank: int, skipped: int | None = None) -> SamplerAdapter:
    rng = torch.Generator().manual_seed(seed)
    pairs = [
        LoraPair(
            torch.randn(len(site.paths) * rank, site.in_features, generator=rng) * 0.2,
            tuple(torch.randn(size, rank, generator=rng) for size in site.out_features),
        )
        for site in host.lora_targets
    ]
    weights = [None if number == skipped else pair for number, pair in enumerate(pairs)]
    return SamplerAdapter(seed, 0.5, weights)


def filled_blocks() -> list[KVBlock]:
    rng = torch.Generator().manual_seed(7)
    blocks = [KVBlock(KIND, len(lengths), CAPACITY) for lengths in LENGTHS]
    for block in blocks:
        for one in block.keys + block.values:
            one.normal_(generator=rng)
    return blocks


def run(
    host: HostedModel, rows: DecodeLora, more: list[AttentionSegment] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of a step, and what is kept afterwards."""
    blocks = filled_blocks()
    parts: list[AttentionSegment] = [
        DecodeRows(*pair) for pair in zip(blocks, LENGTHS, strict=True)
    ]
    positions = np.concatenate(LENGTHS)[ORDER.numpy()]
    num_more = sum(part.num_rows for part in more or [])
    positions = np.concatenate([positions, np.arange(num_more)])
    with torch.no_grad():
        hidden = host.hidden_states(
            torch.arange(len(positions)) * 7 % VOCAB_SIZE,
            torch.from_numpy(positions),
            ForwardContext(rows, CachedAttention([*parts, *(more or [])], ORDER)),
        )
    return hidden, [one for block in blocks for one in block.keys + block.values]


@pytest.mark.parametrize(
    "overrides",
    [{}, {"attention_bias": True}, {"use_sliding_window": True, "sliding_window": 8}],
    ids=["plain", "bias", "window"],
)
def test_a_step_says_what_the_layers_say(
    steps: Steps, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sliding_window" in overrides:
        overrides = {**overrides, "layer_types": ["sliding_attention", "full_attention"]}
    host = tiny_host(**overrides)
    rows = DecodeLora(
        [AdapterSpan(0, 2, adapter(host, 1, 4)), AdapterSpan(3, 5, adapter(host, 2, 20, skipped=1))]
    )
    hidden, kept = run(host, rows)
    assert steps.num_rows[-1] == 5
    monkeypatch.setattr(FusedDecoder, "hidden_states", lambda self, *args: None)
    wanted, wanted_kept = run(host, rows)
    assert torch.equal(hidden, wanted)
    assert all(map(torch.equal, kept, wanted_kept))
    base, _ = run(host, DecodeLora([]))
    assert torch.equal(hidden[2], base[2]), "a row without an adapter is the base model's"
    assert not torch.allclose(hidden[0], base[0])


def test_a_sample_is_the_same_in_a_pass_that_also_reads_a_prompt(steps: Steps) -> None:
    host = tiny_host()
    alone, _ = run(host, DecodeLora([]))
    assert steps.num_rows[-1] == 5
    num_before = len(steps.num_rows)
    together, _ = run(host, DecodeLora([]), [PrefillRows(PromptKV(KIND, 6), 0, 6)])
    assert len(steps.num_rows) == num_before, "a prompt is read layer by layer"
    assert torch.equal(alone, together[:5])


def test_shared_prompt_uses_layer_path(steps: Steps) -> None:
    host = tiny_host()
    num_before = len(steps.num_rows)
    stored, (block, _) = PromptKV(KIND, 4), filled_blocks()
    for one in stored.keys + stored.values:
        one.zero_()
    part = DecodeRows(block, LENGTHS[0], stored)
    with torch.no_grad():
        host.hidden_states(
            torch.arange(3),
            torch.from_numpy(LENGTHS[0] + 4),
            ForwardContext(DecodeLora([]), CachedAttention([part])),
        )
    assert len(steps.num_rows) == num_before


@pytest.mark.parametrize("name", ["gemma2", "granite", "qwen3_moe", "gpt2"])
def test_custom_layers_use_layer_path(steps: Steps, name: str) -> None:
    HostedModel(build(name))
    assert not steps.num_rows or name == "granite", "granite's layers only look usual"


def test_a_model_is_taken_at_its_word_only_if_it_says_the_same(
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
    assert outcomes == [True, False], "granite multiplies what each layer adds"


def test_numbers_of_lower_precision_are_left_to_torch(steps: Steps) -> None:
    tiny_host(dtype=torch.bfloat16)
    assert not steps.num_rows


def test_positions_beyond_those_known_are_looked_up_too(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.nn.ops.rotary._FIRST_POSITIONS", 4)
    few, _ = run(tiny_host(), DecodeLora([]))
    monkeypatch.setattr("tinkex.nn.ops.rotary._FIRST_POSITIONS", 512)
    many, _ = run(tiny_host(), DecodeLora([]))
    assert torch.equal(few, many)
