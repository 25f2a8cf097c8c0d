"""Rows that are sampled get the part of their own adapter, and nothing is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tinkex.engine.sampling.request_state import SamplerAdapter
from tinkex.nn.lora_decode import AdapterSpan, DecodeLora
from tinkex.nn.lora_layout import LoraPair, LoraTarget, TargetKind
from tinkex.nn.lora_training import LoraSegment, SegmentedLora

SITES = [
    LoraTarget(kind=TargetKind.ATTENTION, paths=("q", "k"), in_features=6, out_features=(8, 4)),
    LoraTarget(kind=TargetKind.MLP, paths=("up",), in_features=6, out_features=(5,)),
]


def _adapter(seed: int, rank: int, has_mlp: bool = True) -> SamplerAdapter:
    rng = torch.Generator().manual_seed(seed)

    def pair(site: LoraTarget) -> LoraPair:
        down = torch.randn(len(site.paths) * rank, site.in_features, generator=rng)
        ups = [torch.randn(size, rank, generator=rng) for size in site.out_features]
        return LoraPair(down, tuple(ups))

    return SamplerAdapter(seed, 0.5 + seed, [pair(SITES[0]), pair(SITES[1]) if has_mlp else None])


STRETCHES = [
    AdapterSpan(0, 3, _adapter(1, 2)),
    AdapterSpan(4, 5, _adapter(2, 3, has_mlp=False)),
    AdapterSpan(5, 6, _adapter(3, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("site", [0, 1])
def test_each_stretch_gets_its_own_adapter(site: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = torch.zeros(7, sum(SITES[site].out_features), dtype=dtype)
    wanted = y.clone()
    segments = [LoraSegment(a, b, one.scale, one.weights) for a, b, one in STRETCHES]
    SegmentedLora(segments).add(site, x, wanted)
    stretches = [one._replace(adapter=replace(one.adapter, dtype=dtype)) for one in STRETCHES]
    DecodeLora(stretches).add(site, x, y)
    assert torch.allclose(y, wanted, atol=1e-5)
    assert not y[3].any() and not y[6].any(), "the base model's rows are left alone"
    assert y[:3].any()


def test_row_to_adapter_mapping() -> None:
    numbers, owners = DecodeLora(STRETCHES).adapters_by_row(7)
    assert numbers.tolist() == [0, 0, 0, -1, 1, 2, -1]
    assert [one.scale for one in owners] == [one.adapter.scale for one in STRETCHES]
    assert all(one.gradient is None for one in owners)


def test_nothing_is_trained() -> None:
    rows = DecodeLora(STRETCHES)
    assert not rows.is_trained(0)
    with pytest.raises(AssertionError, match="no gradient"):
        rows.backward(0, torch.zeros(1, 6), torch.zeros(1, 12), None, None)
