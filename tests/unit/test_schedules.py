from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.schedules import SCHEDULE_KINDS, ScheduleKind, learning_rate, warmup_steps


@pytest.mark.parametrize(
    ("warmup", "expected"), [(0.0, 0), (0.1, 2), (0.99, 20), (1, 1), (5, 5), (50, 20)]
)
def test_warmup_is_a_fraction_or_a_number_of_steps(warmup: float, expected: int) -> None:
    assert warmup_steps(warmup, 20) == expected


def rates(kind: ScheduleKind, total: int = 10, warmup: int = 4) -> list[float]:
    return [
        learning_rate(step, peak=8.0, warmup=warmup, total=total, kind=kind)
        for step in range(total)
    ]


def test_rate_warms_up_linearly_then_decays() -> None:
    assert rates("constant") == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert rates("linear")[4:] == pytest.approx([8 * (1 - i / 6) for i in range(6)])
    assert rates("cosine")[4] == 8.0
    assert rates("cosine")[7] == pytest.approx(4.0)


@given(st.sampled_from(SCHEDULE_KINDS), st.integers(1, 50), st.integers(0, 60))
def test_rate_is_positive_at_most_the_peak_and_never_rises_after_warmup(
    kind: ScheduleKind, total: int, warmup: int
) -> None:
    warmup = min(warmup, total)
    values = rates(kind, total, warmup)
    assert all(0.0 < rate <= 8.0 for rate in values)
    assert max(values) == 8.0
    tail = values[warmup:]
    assert tail == sorted(tail, reverse=True)


@given(
    peak=st.floats(1e-9, 1.0),
    step=st.integers(0, 300),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
)
def test_cosine_without_a_floor_is_bit_identical_to_the_plain_formula(
    peak: float, step: int, warmup: int, total: int
) -> None:
    rate = learning_rate(step, peak=peak, warmup=warmup, total=total, kind="cosine")
    if step < warmup:
        assert rate == peak * (step + 1) / warmup
        return
    done = (step - warmup) / max(1, total - warmup)
    assert rate == peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
