"""Products of a batch equal torch's, whatever their shapes and strides, and whoever is beside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.nn.ops.library import load_kernels
from tinkex.nn.ops.packed_matmul import MatmulBatch


def drawn(rows: int, columns: int, seed: int, *, is_turned: bool = False) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    if is_turned:
        return torch.randn(columns, rows + 3, generator=rng)[:, 2 : rows + 2].t()
    return torch.randn(rows, columns + 5, generator=rng)[:, 1 : columns + 1]


sizes = st.integers(1, 150)


@settings(max_examples=80, deadline=None)
@given(
    rows=sizes, inputs=st.integers(1, 600), outputs=sizes, turned=st.tuples(*[st.booleans()] * 2)
)
def test_products_of_any_shape_are_written_and_added(
    rows: int, inputs: int, outputs: int, turned: tuple[bool, bool]
) -> None:
    left = drawn(rows, inputs, 1, is_turned=turned[0])
    right = drawn(inputs, outputs, 2, is_turned=turned[1])
    written, added = drawn(rows, outputs, 3), drawn(rows, outputs, 4)
    exact = left.double() @ right.double()
    wanted = added.double() + 0.5 * exact
    batch = MatmulBatch()
    batch.write(written, left, right)
    batch.add(added, left, right, 0.5)
    batch.run()
    torch.testing.assert_close(written.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(added.double(), wanted, rtol=1e-5, atol=1e-4)


def test_nothing_is_computed_before_the_batch_runs() -> None:
    left, right, total = torch.zeros(4, 3), drawn(3, 5, 1), torch.zeros(4, 5)
    batch = MatmulBatch()
    batch.write(total, left, right)
    left.fill_(1.0)
    batch.run()
    torch.testing.assert_close(total, left @ right)


def test_large_products_are_torchs_and_wait_for_the_batch_too() -> None:
    left, right = torch.zeros(300, 300), drawn(300, 200, 1)
    total = torch.zeros(300, 200)
    batch = MatmulBatch()
    batch.add(total, left, right, 2.0)
    left.copy_(drawn(300, 300, 2))
    batch.run()
    torch.testing.assert_close(total, 2.0 * left @ right, rtol=1e-5, atol=1e-4)


def test_a_product_is_the_same_to_the_bit_in_any_company() -> None:
    left, right = drawn(64, 300, 1), drawn(300, 48, 2)

    def found(num_others: int) -> torch.Tensor:
        total, batch = torch.zeros(64, 48), MatmulBatch()
        for seed in range(num_others):
            batch.write(torch.zeros(64, 48), drawn(64, 300, 10 + seed), right)
        batch.add(total, left, right, 0.25)
        batch.run()
        return total

    assert torch.equal(found(0), found(7))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_accumulate_into_lower_precision(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr("tinkex.nn.ops.packed_matmul.load_kernels", lambda: None)
    assert load_kernels() is not None
    total, left, right = torch.ones(4, 6).bfloat16(), drawn(4, 8, 1), drawn(8, 6, 2)
    wanted = 1.0 + 0.5 * (left @ right)
    batch = MatmulBatch()
    batch.add(total, left, right, 0.5)
    batch.run()
    torch.testing.assert_close(total.float(), wanted, rtol=1e-2, atol=1e-2)
