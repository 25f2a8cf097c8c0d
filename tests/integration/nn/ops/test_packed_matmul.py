from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.nn.ops.gradient_checks import threads
from tinkex.nn.lora_decode import build_decode_pairs
from tinkex.nn.lora_layout import LoraPair
from tinkex.nn.lora_linear import FrozenLinear
from tinkex.nn.ops.packed_matmul import MatmulBatch, PackedLoraPair, PackedWeight

#: Rounding of float32 sums, against sums of float64.
CLOSE = {"rtol": 1e-5, "atol": 1e-4}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 200),
    inputs=st.integers(1, 1100),
    outputs=st.integers(1, 70),
    has_bias=st.booleans(),
)
def test_matmul_matches_torch_for_any_shape(
    rows: int, inputs: int, outputs: int, has_bias: bool
) -> None:
    weight, x = random(inputs, outputs), random(rows, inputs, seed=1)
    bias = random(outputs, seed=2) if has_bias else None
    actual = PackedWeight(weight).matmul(x, bias)
    expected = x.double() @ weight.double() + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(actual.double(), expected, **CLOSE)


def test_matmul_of_no_rows() -> None:
    assert PackedWeight(random(8, 20)).matmul(random(0, 8)).shape == (0, 20)


def test_packing_round_trip() -> None:
    for outputs in (1, 15, 16, 17, 48):
        weight = random(7, outputs)
        assert torch.equal(PackedWeight(weight).weight_KN(), weight)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_row_is_independent_of_other_rows_and_of_the_thread_count(num_threads: int) -> None:
    x, packed = random(130, 1200, seed=1), PackedWeight(random(1200, 600))
    alone = torch.cat([packed.matmul(row.unsqueeze(0)) for row in x])
    with threads(num_threads):
        together = [packed.matmul(x[:num]) for num in (1, 2, 5, 6, 7, 13, 96, 97, 130)]
    for rows in together:
        assert torch.equal(rows, alone[: len(rows)])


def test_strided_input_and_output() -> None:
    weight, wide = random(10, 20), random(5, 30, seed=1)
    x, out = wide[:, 4:14], torch.full((5, 40), 7.0)
    packed = PackedWeight(weight)
    actual = packed.matmul(x, out_MN=out[:, 8:28])
    torch.testing.assert_close(actual, x @ weight, **CLOSE)
    assert (out[:, :8] == 7.0).all() and (out[:, 28:] == 7.0).all()
    torch.testing.assert_close(packed.matmul(wide.t()[:10].t()), wide[:, :10] @ weight, **CLOSE)


def test_matmul_of_overlapping_rows_matches_torch() -> None:
    x, weight = random(1, 30)[0].unfold(0, 8, 1)[:4], random(8, 20, seed=1)
    torch.testing.assert_close(PackedWeight(weight).matmul(x), x @ weight, **CLOSE)


def test_wrong_shapes_and_dtypes_are_rejected() -> None:
    packed = PackedWeight(random(8, 20))
    pair = PackedLoraPair(random(2, 8), [random(20, 2)], 1.0)
    for x in (random(3, 7), random(3, 9), random(3, 8).bfloat16(), random(3, 8).double()):
        with pytest.raises(RuntimeError, match="expected 8"):
            packed.matmul(x)
        with pytest.raises(RuntimeError, match="expected 8"):
            pair.add(x, torch.zeros(3, 20))
    for y in (torch.zeros(3, 19), torch.zeros(4, 20), torch.zeros(20, 3).t()):
        with pytest.raises(RuntimeError, match="cannot hold"):
            packed.matmul(random(3, 8), out_MN=y)
        with pytest.raises(RuntimeError, match="cannot hold"):
            pair.add(random(3, 8), y)


def test_nan_and_infinity_stay_in_their_row() -> None:
    x = random(8, 32)
    x[3, 5], x[6, 0] = float("nan"), float("inf")
    y = PackedWeight(random(32, 24)).matmul(x)
    assert y[3].isnan().all() and not y[6].isfinite().any()
    assert y[[0, 1, 2, 4, 5, 7]].isfinite().all()


SHAPES = [(1, 1), (7, 5), (16, 16), (300, 33), (260, 600)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_sixteen_bit_weight_gives_the_bits_of_float32(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = (random(*shape) * 1e-3).to(dtype).float()
    narrow, wide = PackedWeight(weight, dtype), PackedWeight(weight, torch.float32)
    assert 2 * narrow.num_bytes == wide.num_bytes
    assert torch.equal(narrow.weight_KN(), weight)
    assert torch.equal(narrow.columns(torch.arange(shape[1])), weight.t())
    for rows in (1, 2, 6, 7, 16, 200):
        x, dy = random(rows, shape[0], seed=1), random(rows, shape[1], seed=2)
        assert torch.equal(narrow.matmul(x), wide.matmul(x))
        assert torch.equal(narrow.matmul_transposed(dy), wide.matmul_transposed(dy))


def test_numbers_that_do_not_fit_stay_float32() -> None:
    weight = torch.ones(40, 20)
    for value, dtype in [
        (1.0, torch.bfloat16),
        (3e38, torch.float32),  # not exact in bfloat16, too large for float16
        (1.0 + 2**-10, torch.float16),
        (2.0**-130, torch.bfloat16),  # subnormal
        (1.0 + 2**-20, torch.float32),
        (float("nan"), torch.float32),
    ]:
        weight[39, 19] = value
        assert PackedWeight(weight).dtype == dtype


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_transposed_product_equals_the_product_with_a_transposed_weight(
    shape: tuple[int, int], num_threads: int
) -> None:
    weight, wide = random(*shape), random(200, shape[1] + 3, seed=1)
    expected = PackedWeight(weight.t()).matmul(wide[:, 2 : shape[1] + 2])
    with threads(num_threads):
        for rows in (0, 1, 7, 192, 200):
            dy = wide[:rows, 2 : shape[1] + 2]
            assert torch.equal(PackedWeight(weight).matmul_transposed(dy), expected[:rows])


def test_unknown_columns_are_rejected() -> None:
    packed = PackedWeight(random(8, 20))
    for index in (-1, 20):
        with pytest.raises(IndexError, match="vocabulary of 20"):
            packed.columns(torch.tensor([0, index]))


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("sizes", [(8,), (24, 7, 33)])
def test_packed_lora_pair_matches_torch(rows: int, sizes: tuple[int, ...]) -> None:
    rank, inputs = 5, 40
    down = random(rank * len(sizes), inputs)
    ups = [random(size, rank, seed=2 + i) for i, size in enumerate(sizes)]
    x, y = random(rows, inputs, seed=1), random(rows, sum(sizes), seed=9)
    updates = [
        (x.double() @ part.double().t()) @ up.double().t()
        for part, up in zip(down.split(rank), ups, strict=True)
    ]
    expected = y.double() + 0.5 * torch.cat(updates, dim=1)
    PackedLoraPair(down, ups, 0.5).add(x, y)
    torch.testing.assert_close(y.double(), expected, **CLOSE)


def test_adapter_panels_are_packed_for_float32_only() -> None:
    pair = LoraPair(random(1, 64), (random(64, 1),))
    [packed], [plain] = (
        build_decode_pairs([pair], 1.0, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert packed is not None and plain is not None
    assert packed.num_bytes == 4 * (64 * 16 + 64)
    assert plain.num_bytes == 0


def test_torch_fallback_matches_kernels(request: pytest.FixtureRequest) -> None:
    linear = torch.nn.Linear(33, 21)
    x, dy = random(9, 33), random(9, 21, seed=1)
    pair = LoraPair(random(4, 33), (random(21, 4),))

    def run_all() -> list[torch.Tensor]:
        frozen = FrozenLinear.from_modules([linear])
        if frozen.copy_bytes:
            frozen.make_copy()
        y = torch.zeros(9, 21)
        [decode_pair] = build_decode_pairs([pair], 0.25, torch.float32)
        assert decode_pair is not None
        decode_pair.add(x, y)
        return [frozen.forward(x), frozen.backward(dy), frozen.weight_KN, y]

    with_kernels = run_all()
    request.getfixturevalue("without_kernels")
    assert FrozenLinear.from_modules([linear]).packed_weight is None
    for actual, expected in zip(with_kernels, run_all(), strict=True):
        torch.testing.assert_close(actual, expected, **CLOSE)


# --- batches --------------------------------------------------------------------------------------


def strided(rows: int, columns: int, seed: int, *, is_transposed: bool = False) -> torch.Tensor:
    if is_transposed:
        return random(columns, rows + 3, seed=seed)[:, 2 : rows + 2].t()
    return random(rows, columns + 5, seed=seed)[:, 1 : columns + 1]


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 150),
    inputs=st.integers(1, 600),
    outputs=st.integers(1, 150),
    transposed=st.tuples(st.booleans(), st.booleans()),
)
def test_batch_matches_torch_for_any_shape_and_stride(
    rows: int, inputs: int, outputs: int, transposed: tuple[bool, bool]
) -> None:
    left = strided(rows, inputs, 1, is_transposed=transposed[0])
    right = strided(inputs, outputs, 2, is_transposed=transposed[1])
    written, added = strided(rows, outputs, 3), strided(rows, outputs, 4)
    product = left.double() @ right.double()
    expected = added.double() + 0.5 * product
    batch = MatmulBatch()
    batch.write(written, left, right)
    batch.add(added, left, right, 0.5)
    batch.run()
    torch.testing.assert_close(written.double(), product, **CLOSE)
    torch.testing.assert_close(added.double(), expected, **CLOSE)


@pytest.mark.parametrize("size", [4, 300], ids=["kernel", "torch"])
def test_batch_runs_nothing_before_run(size: int) -> None:
    left, right, out = torch.zeros(size, size), random(size, 200), torch.zeros(size, 200)
    batch = MatmulBatch()
    batch.add(out, left, right, 2.0)
    left.copy_(random(size, size, seed=2))
    batch.run()
    torch.testing.assert_close(out, 2.0 * left @ right, **CLOSE)


def test_product_is_independent_of_other_products() -> None:
    left, right = strided(64, 300, 1), strided(300, 48, 2)

    def run_with(num_others: int) -> torch.Tensor:
        out, batch = torch.zeros(64, 48), MatmulBatch()
        for seed in range(num_others):
            batch.write(torch.zeros(64, 48), strided(64, 300, 10 + seed), right)
        batch.add(out, left, right, 0.25)
        batch.run()
        return out

    assert torch.equal(run_with(0), run_with(7))


@pytest.mark.usefixtures("implementation")
def test_accumulate_into_lower_precision() -> None:
    out, left, right = torch.ones(4, 6).bfloat16(), strided(4, 8, 1), strided(8, 6, 2)
    batch = MatmulBatch()
    batch.add(out, left, right, 0.5)
    batch.run()
    expected = 1.0 + 0.5 * (left @ right)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
