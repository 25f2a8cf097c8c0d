from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tinkex.engine.sampling.request_state import SamplerAdapter
from tinkex.nn.lora_decode import AdapterSpan, DecodeLora
from tinkex.nn.lora_layout import LoraPair, LoraTarget, TargetKind
from tinkex.nn.lora_training import LoraSegment, SegmentedLora

TARGETS = [
    LoraTarget(kind=TargetKind.ATTENTION, paths=("q", "k"), in_features=6, out_features=(8, 4)),
    LoraTarget(kind=TargetKind.MLP, paths=("up",), in_features=6, out_features=(5,)),
]


def _adapter(seed: int, rank: int, has_mlp: bool = True) -> SamplerAdapter:
    rng = torch.Generator().manual_seed(seed)

    def pair(target: LoraTarget) -> LoraPair:
        down = torch.randn(len(target.paths) * rank, target.in_features, generator=rng)
        ups = [torch.randn(size, rank, generator=rng) for size in target.out_features]
        return LoraPair(down, tuple(ups))

    return SamplerAdapter(
        seed, 0.5 + seed, [pair(TARGETS[0]), pair(TARGETS[1]) if has_mlp else None]
    )


SPANS = [
    AdapterSpan(0, 3, _adapter(1, 2)),
    AdapterSpan(4, 5, _adapter(2, 3, has_mlp=False)),
    AdapterSpan(5, 6, _adapter(3, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [0, 1])
def test_each_span_uses_its_adapter(index: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = torch.zeros(7, sum(TARGETS[index].out_features), dtype=dtype)
    expected = y.clone()
    segments = [LoraSegment(a, b, one.scale, one.weights) for a, b, one in SPANS]
    SegmentedLora(segments).add(index, x, expected)
    spans = [one._replace(adapter=replace(one.adapter, dtype=dtype)) for one in SPANS]
    DecodeLora(spans).add(index, x, y)
    assert torch.allclose(y, expected, atol=1e-5)
    assert not y[3].any() and not y[6].any(), "rows without an adapter are unchanged"
    assert y[:3].any()


def test_row_to_adapter_mapping() -> None:
    indices, adapters = DecodeLora(SPANS).adapters_by_row(7)
    assert indices.tolist() == [0, 0, 0, -1, 1, 2, -1]
    assert [one.scale for one in adapters] == [one.adapter.scale for one in SPANS]
    assert all(one.gradient is None for one in adapters)


def test_decode_has_no_gradient() -> None:
    lora = DecodeLora(SPANS)
    assert not lora.is_trained(0)
    with pytest.raises(AssertionError, match="no gradient"):
        lora.backward(0, torch.zeros(1, 6), torch.zeros(1, 12), (), None)
