from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.recipes.schedule import (
    SCHEDULES,
    Schedule,
    batch_at,
    count_steps,
    derive_seed,
    learning_rate,
    steps_per_epoch,
    warmup_steps,
)

SIZES = st.integers(1, 50)


@given(SIZES, st.integers(1, 60), st.integers(0, 5), st.integers(0, 3))
def test_every_epoch_sees_every_row_once(rows: int, size: int, seed: int, epoch: int) -> None:
    num_steps = steps_per_epoch(rows, size)
    batches = [batch_at(epoch * num_steps + i, rows, size, seed) for i in range(num_steps)]
    assert {batch.epoch for batch in batches} == {epoch}
    assert sorted(row for batch in batches for row in batch.rows) == list(range(rows))
    assert all(len(batch.rows) == size for batch in batches[:-1])


def test_order_changes_with_epoch_and_seed_and_with_nothing_else() -> None:
    first = batch_at(0, 100, 100, seed=1).rows
    assert batch_at(0, 100, 100, seed=1).rows == first
    assert batch_at(1, 100, 100, seed=1).rows != first
    assert batch_at(0, 100, 100, seed=2).rows != first
    assert list(first) != list(range(100))


def test_steps_win_over_epochs() -> None:
    assert count_steps(10, 4, 3, None) == 9
    assert count_steps(10, 4, 3, 5) == 5


@pytest.mark.parametrize(
    ("warmup", "expected"), [(0.0, 0), (0.1, 2), (0.99, 20), (1, 1), (5, 5), (50, 20)]
)
def test_a_warmup_is_a_share_or_a_number(warmup: float, expected: int) -> None:
    assert warmup_steps(warmup, 20) == expected


def rates(schedule: Schedule, total: int = 10, num_warmup: int = 4) -> list[float]:
    return [
        learning_rate(step, total, peak=8.0, num_warmup=num_warmup, schedule=schedule)
        for step in range(total)
    ]


def test_the_rate_rises_in_a_line_then_follows_the_schedule() -> None:
    assert rates("constant") == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert rates("linear")[4:] == pytest.approx([8 * (1 - i / 6) for i in range(6)])
    assert rates("cosine")[4] == 8.0
    assert rates("cosine")[7] == pytest.approx(4.0)


@given(st.sampled_from(SCHEDULES), SIZES, st.integers(0, 60))
def test_the_rate_is_positive_never_above_the_peak_and_falls_after_the_warmup(
    schedule: Schedule, total: int, num_warmup: int
) -> None:
    num_warmup = min(num_warmup, total)
    found = rates(schedule, total, num_warmup)
    assert all(0.0 < rate <= 8.0 for rate in found)
    assert max(found) == 8.0
    tail = found[num_warmup:]
    assert tail == sorted(tail, reverse=True)


def test_seeds_differ_by_every_part() -> None:
    seeds = {derive_seed(s, step, row) for s in range(3) for step in range(3) for row in range(3)}
    assert len(seeds) == 27
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)
