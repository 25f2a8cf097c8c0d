"""Back-off after a 429: never shortened, ended by a later success."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client.rate_limits import LARGE_PROMPT_BYTES, RateLimiter, rate_limit_backoff

quick = settings(max_examples=80, deadline=None, derandomize=True)


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_new_limiter_does_not_delay() -> None:
    limiter = RateLimiter(Clock())
    assert limiter.remaining_seconds() == 0.0
    assert not limiter.is_backing_off()
    assert not limiter.is_recovering(10.0)


def test_backoff_expires() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    limiter.back_off(5.0)
    assert limiter.now() == 1000.0
    assert limiter.remaining_seconds() == 5.0
    clock.now += 4.9
    assert limiter.is_backing_off()
    clock.now += 0.1
    assert not limiter.is_backing_off()
    clock.now += 100.0
    assert limiter.remaining_seconds() == 0.0


def test_shorter_backoff_does_not_shorten() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    limiter.back_off(30.0)
    clock.now += 1.0
    limiter.back_off(1.0)
    assert limiter.remaining_seconds() == 29.0
    limiter.back_off(60.0)
    assert limiter.remaining_seconds() == 60.0


def test_success_started_before_backoff_does_not_end_it() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    started_at = limiter.now()
    clock.now += 1.0
    limiter.back_off(5.0)
    clock.now += 1.0
    limiter.end_backoff(started_at)
    assert limiter.remaining_seconds() == 4.0
    limiter.end_backoff(started_at=1001.0)
    assert limiter.remaining_seconds() == 4.0


def test_success_started_after_backoff_ends_it() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    limiter.back_off(5.0)
    clock.now += 1.0
    limiter.end_backoff(started_at=clock.now)
    assert limiter.remaining_seconds() == 0.0


def test_earlier_success_does_not_clear_second_refusal() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    limiter.back_off(5.0)
    clock.now += 1.0
    started_at = clock.now
    clock.now += 1.0
    limiter.back_off(1.0)
    limiter.end_backoff(started_at)
    assert limiter.remaining_seconds() == 3.0


def test_recovery_continues_after_one_success() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    limiter.back_off(2.0)
    assert limiter.is_recovering(10.0)
    clock.now += 3.0
    limiter.end_backoff(started_at=clock.now)
    assert limiter.is_recovering(10.0)
    clock.now += 8.9
    assert limiter.is_recovering(10.0)
    clock.now += 0.2
    assert not limiter.is_recovering(10.0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["set", "clear", "pass"]),
        st.floats(0.0, 100.0, allow_nan=False),
        st.floats(0.0, 200.0, allow_nan=False),
    ),
    max_size=30,
)


@quick
@given(STEPS)
def test_limiter_invariants_hold(steps: list[tuple[str, float, float]]) -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    last_set = float("-inf")
    for action, amount, ago in steps:
        before = limiter.remaining_seconds()
        if action == "set":
            limiter.back_off(amount)
            last_set = clock.now
            assert limiter.remaining_seconds() >= max(before, amount) - 1e-9
        elif action == "clear":
            started_at = clock.now - ago
            limiter.end_backoff(started_at)
            expected = 0.0 if started_at > last_set else before
            assert limiter.remaining_seconds() == pytest.approx(expected)
        else:
            clock.now += amount
            assert limiter.remaining_seconds() <= before
        assert limiter.remaining_seconds() >= 0.0
        assert limiter.is_backing_off() is (limiter.remaining_seconds() > 0.0)


@pytest.mark.parametrize(
    ("num_bytes", "retry_after", "expected"),
    [
        (10, None, 1.0),
        (LARGE_PROMPT_BYTES, None, 1.0),
        (LARGE_PROMPT_BYTES + 1, None, 5.0),
        (10, 0.2, 1.0),
        (10, 30.0, 30.0),
        (LARGE_PROMPT_BYTES + 1, 3.0, 5.0),
        (LARGE_PROMPT_BYTES + 1, 9.0, 9.0),
    ],
)
def test_backoff_is_max_of_retry_after_and_default(
    num_bytes: int, retry_after: float | None, expected: float
) -> None:
    assert rate_limit_backoff(num_bytes, retry_after) == expected
