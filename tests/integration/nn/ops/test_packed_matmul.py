"""Our own products equal torch's, and a row's depend on nothing but the row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.nn.lora_decode import build_decode_pairs
from tinkex.nn.lora_layout import LoraPair
from tinkex.nn.lora_linear import FrozenLinear
from tinkex.nn.ops.library import load_kernels
from tinkex.nn.ops.packed_matmul import PackedLoraPair, PackedWeight

#: Rounding of float32 sums, against sums of float64.
CLOSE = {"rtol": 1e-5, "atol": 1e-4}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_this_machine_compiles_the_kernels() -> None:
    assert load_kernels() is not None, "tests need a C compiler; see scripts/system-packages.sh"


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 200),
    inputs=st.integers(1, 1100),
    outputs=st.integers(1, 70),
    has_bias=st.booleans(),
)
def test_products_of_any_shape_are_right(
    rows: int, inputs: int, outputs: int, has_bias: bool
) -> None:
    weight, x = drawn(inputs, outputs), drawn(rows, inputs, seed=1)
    bias = drawn(outputs, seed=2) if has_bias else None
    found = PackedWeight(weight).matmul(x, bias)
    wanted = x.double() @ weight.double() + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), wanted, **CLOSE)


def test_no_rows_are_no_product() -> None:
    assert PackedWeight(drawn(8, 20)).matmul(drawn(0, 8)).shape == (0, 20)


def test_a_weight_comes_back_as_it_was() -> None:
    for outputs in (1, 15, 16, 17, 48):
        weight = drawn(7, outputs)
        assert torch.equal(PackedWeight(weight).weight_KN(), weight)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_to_the_bit_in_any_company(threads: int) -> None:
    weight, x = drawn(1200, 600), drawn(130, 1200, seed=1)
    panels = PackedWeight(weight)
    alone = torch.cat([panels.matmul(row.unsqueeze(0)) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = [panels.matmul(x[:num]) for num in (1, 2, 5, 6, 7, 13, 96, 97, 130)]
    finally:
        torch.set_num_threads(before)
    for found in together:
        assert torch.equal(found, alone[: len(found)])


def test_rows_that_lie_apart_are_read_and_written_where_they_are() -> None:
    weight, wide = drawn(10, 20), drawn(5, 30, seed=1)
    x, out = wide[:, 4:14], torch.full((5, 40), 7.0)
    panels = PackedWeight(weight)
    found = panels.matmul(x, out_MN=out[:, 8:28])
    torch.testing.assert_close(found, x @ weight, **CLOSE)
    assert (out[:, :8] == 7.0).all() and (out[:, 28:] == 7.0).all()
    torch.testing.assert_close(panels.matmul(wide.t()[:10].t()), wide[:, :10] @ weight, **CLOSE)


def test_rows_of_another_width_or_type_are_refused_as_torch_does() -> None:
    panels = PackedWeight(drawn(8, 20))
    low = PackedLoraPair(drawn(2, 8), [drawn(20, 2)], 1.0)
    for x in (drawn(3, 7), drawn(3, 9), drawn(3, 8).bfloat16(), drawn(3, 8).double()):
        with pytest.raises(RuntimeError, match="expected 8"):
            panels.matmul(x)
        with pytest.raises(RuntimeError, match="expected 8"):
            low.add(x, torch.zeros(3, 20))
    for y in (torch.zeros(3, 19), torch.zeros(4, 20), torch.zeros(20, 3).t()):
        with pytest.raises(RuntimeError, match="cannot hold"):
            panels.matmul(drawn(3, 8), out_MN=y)
        with pytest.raises(RuntimeError, match="cannot hold"):
            low.add(drawn(3, 8), y)


def test_rows_that_overlap_are_no_gathered_rows() -> None:
    x, weight = drawn(1, 30)[0].unfold(0, 8, 1)[:4], drawn(8, 20, seed=1)
    torch.testing.assert_close(PackedWeight(weight).matmul(x), x @ weight, **CLOSE)


def test_adapter_panels_are_packed_for_float32_only() -> None:
    pair = LoraPair(drawn(1, 64), (drawn(64, 1),))
    [ready], [unused] = (
        build_decode_pairs([pair], 1.0, d) for d in (torch.float32, torch.bfloat16)
    )
    assert ready is not None and unused is not None
    assert ready.num_bytes == 4 * (64 * 16 + 64)
    assert unused.num_bytes == 0


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x = drawn(8, 32)
    x[3, 5], x[6, 0] = float("nan"), float("inf")
    found = PackedWeight(drawn(32, 24)).matmul(x)
    assert found[3].isnan().all() and not found[6].isfinite().any()
    assert found[[0, 1, 2, 4, 5, 7]].isfinite().all()


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("sizes", [(8,), (24, 7, 33)])
def test_low_rank_parts_are_added(rows: int, sizes: tuple[int, ...]) -> None:
    rank, inputs = 5, 40
    down = drawn(rank * len(sizes), inputs)
    ups = [drawn(size, rank, seed=2 + i) for i, size in enumerate(sizes)]
    x, y = drawn(rows, inputs, seed=1), drawn(rows, sum(sizes), seed=9)
    parts = [
        (x.double() @ mine.double().t()) @ up.double().t()
        for mine, up in zip(down.split(rank), ups, strict=True)
    ]
    wanted = y.double() + 0.5 * torch.cat(parts, dim=1)
    PackedLoraPair(down, ups, 0.5).add(x, y)
    torch.testing.assert_close(y.double(), wanted, **CLOSE)


def test_without_a_compiler_products_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.Linear(33, 21)
    x, dy = drawn(9, 33), drawn(9, 21, seed=1)
    pair = LoraPair(drawn(4, 33), (drawn(21, 4),))

    def everything() -> list[torch.Tensor]:
        frozen = FrozenLinear.from_modules([linear])
        frozen.make_packed_copy()
        y = torch.zeros(9, 21)
        [ready] = build_decode_pairs([pair], 0.25, torch.float32)
        assert ready is not None
        ready.add(x, y)
        return [frozen.forward(x), frozen.backward(dy), frozen.weight_KN, y]

    ours = everything()
    load_kernels.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: None)
    try:
        assert load_kernels() is None
        theirs = everything()
    finally:
        load_kernels.cache_clear()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


def test_a_compiler_that_fails_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: "/bin/false")
    try:
        assert load_kernels() is None
    finally:
        load_kernels.cache_clear()
