"""The memory budget for request bodies."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tinkex.errors import RateLimitError
from tinkex.server.config import ServerConfig
from tinkex.server.http.request_body import NUM_DECODER_THREADS, BodyMemoryBudget, Overloaded


def intake(max_inflight_bytes: int = 100, max_body_bytes: int = 40) -> BodyMemoryBudget:
    config = ServerConfig(
        home=Path("home"), max_inflight_bytes=max_inflight_bytes, max_body_bytes=max_body_bytes
    )
    return BodyMemoryBudget(config)


def test_request_bytes_are_released() -> None:
    budget = intake()
    with budget.reserve("alice") as hold:
        hold.grow(10)
        hold.grow(30)
        assert budget.num_bytes == 40
    assert budget.num_bytes == 0
    with pytest.raises(ZeroDivisionError), budget.reserve("alice") as hold:
        hold.grow(50)
        raise ZeroDivisionError
    assert budget.num_bytes == 0


def test_tenant_is_limited_to_half_of_budget() -> None:
    budget = intake()
    with budget.reserve("alice") as first, budget.reserve("alice") as second:
        first.grow(40)
        with pytest.raises(RateLimitError) as caught:
            second.grow(20)
    assert caught.value.status_code == 429
    assert caught.value.retry_after_seconds


def test_budget_is_shared_by_all_tenants() -> None:
    budget = intake()
    with budget.reserve("a") as first, budget.reserve("b") as second, budget.reserve("c") as third:
        first.grow(50)
        second.grow(50)
        with pytest.raises(Overloaded) as caught:
            third.grow(1)
    assert caught.value.status_code == 503
    assert caught.value.retryable
    assert caught.value.retry_after_seconds


def test_budget_is_at_least_one_body() -> None:
    budget = intake(max_inflight_bytes=10, max_body_bytes=40)
    with budget.reserve("alice") as hold:
        hold.grow(40)
        assert budget.num_bytes == 40


@pytest.mark.asyncio
async def test_decoders_share_a_limited_number_of_threads() -> None:
    import asyncio

    budget = intake()
    names = await asyncio.gather(
        *(budget.run_decoder(lambda: threading.current_thread().name) for _ in range(20))
    )
    assert len(set(names)) <= NUM_DECODER_THREADS
    assert all(name.startswith("decoder") for name in names)
