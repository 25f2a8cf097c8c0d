"""Scheduling policies: fairness, prefill limits and shared prompts."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.sampling.scheduler import (
    LIGHT_TIME_RATIO,
    MIN_SHARED_GROUP,
    MIN_SHARED_TOKENS,
    PREFILL_TOKENS,
    PREFILL_TOKENS_WITH_DECODE,
    RESERVE_DIVISOR,
    LightStepPolicy,
    can_share_prompt,
    fair_order,
    max_kv_tokens,
    num_free_sequences,
    num_to_start,
    split_prefill_tokens,
)


@given(st.lists(st.integers(1, 2000)), st.booleans(), st.integers(1, 5000))
def test_prefill_tokens_are_limited_and_first_come_first_served(
    wanted: list[int], has_samples: bool, pass_tokens: int
) -> None:
    shares = split_prefill_tokens(wanted, has_decodes=has_samples, pass_tokens=pass_tokens)
    limit = min(pass_tokens, PREFILL_TOKENS_WITH_DECODE if has_samples else PREFILL_TOKENS)
    assert sum(shares) == min(sum(wanted), limit)
    for index, (share, num) in enumerate(zip(shares, wanted, strict=True)):
        assert share == num or not any(shares[index + 1 :])


def test_prefill_is_smaller_while_decoding() -> None:
    assert split_prefill_tokens([10_000], has_decodes=True, pass_tokens=4096) == [
        PREFILL_TOKENS_WITH_DECODE
    ]
    assert split_prefill_tokens([10_000], has_decodes=False, pass_tokens=4096) == [PREFILL_TOKENS]


def test_long_prompt_is_shared() -> None:
    assert can_share_prompt(MIN_SHARED_GROUP, MIN_SHARED_TOKENS)
    assert not can_share_prompt(MIN_SHARED_GROUP - 1, MIN_SHARED_TOKENS)
    assert not can_share_prompt(MIN_SHARED_GROUP, MIN_SHARED_TOKENS - 1)


def test_sequences_start_as_slots_are_free() -> None:
    assert num_to_start(1, 5, 10, 64) == 1
    assert num_to_start(9, 5, 10, 64) == 5
    assert num_to_start(9, 0, 10, 64) == 0


def test_sequences_wait_to_share_a_prompt() -> None:
    assert num_to_start(9, MIN_SHARED_GROUP - 1, 1000, 64) == 0
    assert num_to_start(9, MIN_SHARED_GROUP, 1000, 64) == MIN_SHARED_GROUP
    assert num_to_start(9, 2, 1000, 2) == 2, "there will never be more free sequences"


def test_single_token_needs_no_slot() -> None:
    assert max_kv_tokens(100, 128, 1) == 100
    assert max_kv_tokens(100, 128, 2) == 228


@dataclass(frozen=True)
class _Request:
    tenant_id: str
    arrival: int
    running: tuple[int, ...] = ()


def test_idle_tenant_goes_first() -> None:
    flood = [_Request("loud", arrival, (0,) if arrival < 3 else ()) for arrival in range(6)]
    quiet = [_Request("quiet", arrival) for arrival in (6, 7)]
    order = fair_order([*flood, *quiet])
    assert order[:2] == quiet
    assert fair_order(flood) == flood


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=20))
def test_requests_of_one_tenant_keep_their_order(given: list[tuple[str, int]]) -> None:
    requests = [
        _Request(tenant_id, arrival, tuple(range(num)))
        for arrival, (tenant_id, num) in enumerate(given)
    ]
    order = fair_order(requests)
    assert sorted(order, key=lambda one: one.arrival) == requests
    for tenant_id in "abc":
        arrivals = [one.arrival for one in order if one.tenant_id == tenant_id]
        assert arrivals == sorted(arrivals)


@given(st.integers(1, 200), st.integers(0, 300), st.integers(0, 300))
def test_reserve_is_for_tenants_without_sequences(limit: int, held: int, own: int) -> None:
    own = min(own, held)
    num = num_free_sequences(limit, held, own)
    if own or held + num <= limit:
        assert num == max(0, limit - held)
    else:
        assert num <= 1
        assert held + num <= limit + limit // RESERVE_DIVISOR or num <= 0


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=50), st.floats(0.001, 0.1))
def test_light_tenants_get_their_share_of_time(full: list[float], light: float) -> None:
    policy, spent = LightStepPolicy(), {True: 0.0, False: 0.0}
    waiting = list(full)
    while waiting or policy.is_due:
        is_light = policy.is_due
        seconds = light if is_light else waiting.pop()
        policy.record_step(seconds, is_light=is_light, is_mixed=True)
        spent[is_light] += seconds
    assert spent[True] >= LIGHT_TIME_RATIO * spent[False] - 1e-6
    assert spent[True] <= LIGHT_TIME_RATIO * spent[False] + len(full) * light + 1e-6


def test_new_light_tenant_gets_next_step() -> None:
    policy = LightStepPolicy()
    policy.record_step(1.0, is_light=False, is_mixed=False)
    assert policy.is_due
