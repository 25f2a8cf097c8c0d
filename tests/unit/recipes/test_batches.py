from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.recipes.method import batch_at, count_steps, derive_seed, steps_per_epoch


@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 5), st.integers(0, 3))
def test_every_epoch_contains_every_row_once(rows: int, size: int, seed: int, epoch: int) -> None:
    num_steps = steps_per_epoch(rows, size)
    batches = [batch_at(epoch * num_steps + i, rows, size, seed) for i in range(num_steps)]
    assert {batch.epoch for batch in batches} == {epoch}
    assert sorted(row for batch in batches for row in batch.rows) == list(range(rows))
    assert all(len(batch.rows) == size for batch in batches[:-1])


def test_order_depends_only_on_epoch_and_seed() -> None:
    first = batch_at(0, 100, 100, seed=1).rows
    assert batch_at(0, 100, 100, seed=1).rows == first
    assert batch_at(1, 100, 100, seed=1).rows != first
    assert batch_at(0, 100, 100, seed=2).rows != first
    assert list(first) != list(range(100))


def test_steps_take_precedence_over_epochs() -> None:
    assert count_steps(10, 4, 3, None) == 9
    assert count_steps(10, 4, 3, 5) == 5


def test_derived_seeds_depend_on_every_part() -> None:
    seeds = {derive_seed(s, step, row) for s in range(3) for step in range(3) for row in range(3)}
    assert len(seeds) == 27
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)
