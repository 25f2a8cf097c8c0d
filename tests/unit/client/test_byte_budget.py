"""Byte budgets: granted in order, one oversized reservation at a time, nothing leaked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client.rate_limits import ByteBudget


class Reservation:
    """Work that holds its reservation until released."""

    def __init__(self, budget: ByteBudget, num_bytes: int, log: list[Reservation]) -> None:
        self.num_bytes = num_bytes
        self.is_inside = False
        self._leave = asyncio.Event()
        self._log = log
        self._budget = budget
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._budget.reserve(self.num_bytes):
            self._log.append(self)
            self.is_inside = True
            try:
                await self._leave.wait()
            finally:
                self.is_inside = False

    def leave(self) -> None:
        self._leave.set()


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def on_budget(limit: int) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], None]:
    """Run a test with a budget and a function that adds work."""

    def run(scenario: Callable[..., Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            budget = ByteBudget(limit)
            log: list[Reservation] = []
            await scenario(budget, lambda size: Reservation(budget, size, log), log)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run(main())

    return run


Add = Callable[[int], Reservation]


def test_reservation_that_fits_does_not_wait() -> None:
    @on_budget(10)
    async def _(budget: ByteBudget, add: Add, log: list[Reservation]) -> None:
        pieces = [add(4), add(6), add(0), add(1)]
        await settle()
        assert log == pieces[:3]
        assert budget.used_bytes == 10


def test_reservations_are_granted_in_order() -> None:
    @on_budget(10)
    async def _(budget: ByteBudget, add: Add, log: list[Reservation]) -> None:
        first, large, small = add(6), add(8), add(1)
        await settle()
        # The small one would fit but waits behind the large one.
        assert log == [first]
        first.leave()
        await settle()
        assert log == [first, large, small]


def test_oversized_reservation_runs_alone() -> None:
    @on_budget(10)
    async def _(budget: ByteBudget, add: Add, log: list[Reservation]) -> None:
        small, huge, other_huge, last = add(1), add(50), add(60), add(1)
        await settle()
        assert log == [small]
        small.leave()
        await settle()
        assert log == [small, huge]
        assert budget.used_bytes == 50
        huge.leave()
        await settle()
        assert log == [small, huge, other_huge]
        other_huge.leave()
        await settle()
        assert log == [small, huge, other_huge, last]


def test_cancelled_waiter_holds_no_bytes() -> None:
    @on_budget(10)
    async def _(budget: ByteBudget, add: Add, log: list[Reservation]) -> None:
        first, waiting, last = add(10), add(5), add(10)
        await settle()
        waiting.task.cancel()
        await settle()
        first.leave()
        await settle()
        assert log == [first, last]
        assert budget.used_bytes == 10


def test_cancelling_queue_head_grants_next_waiters() -> None:
    @on_budget(10)
    async def _(budget: ByteBudget, add: Add, log: list[Reservation]) -> None:
        first, large, small = add(6), add(8), add(3)
        await settle()
        large.task.cancel()
        await settle()
        assert log == [first, small]
        assert budget.used_bytes == 9
        late = add(1)
        await settle()
        assert late.is_inside


def test_grant_cancelled_at_same_time_is_released() -> None:
    @on_budget(10)
    async def _(budget: ByteBudget, add: Add, log: list[Reservation]) -> None:
        first, unlucky, last = add(10), add(10), add(10)
        await settle()
        first.leave()
        while len(budget._queue) == 2:
            await asyncio.sleep(0)
        # Granted, but its owner has not run yet.
        assert not unlucky.is_inside
        unlucky.task.cancel()
        await settle()
        assert log == [first, last]
        assert budget.used_bytes == 10


def test_exception_in_block_releases_bytes() -> None:
    async def main() -> int:
        budget = ByteBudget(10)
        with pytest.raises(ZeroDivisionError):
            async with budget.reserve(7):
                raise ZeroDivisionError
        return budget.used_bytes

    assert asyncio.run(main()) == 0


def test_changed_limit_applies_to_next_reservation() -> None:
    @on_budget(10)
    async def _(budget: ByteBudget, add: Add, log: list[Reservation]) -> None:
        first = add(10)
        await settle()
        budget.limit_bytes = 30
        second, third = add(15), add(15)
        await settle()
        assert log == [first, second]
        first.leave()
        await settle()
        assert log == [first, second, third]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "leave", "cancel"]), st.integers(0, 25)), max_size=25
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(ACTIONS)
def test_no_waiter_starves(actions: list[tuple[str, int]]) -> None:
    @on_budget(20)
    async def _(budget: ByteBudget, add: Add, log: list[Reservation]) -> None:
        pieces: list[Reservation] = []
        for action, number in actions:
            if action == "add":
                pieces.append(add(number))
            elif pieces:
                piece = pieces[number % len(pieces)]
                piece.leave() if action == "leave" else piece.task.cancel()
            await settle()
            inside = [piece for piece in pieces if piece.is_inside]
            used = sum(piece.num_bytes for piece in inside)
            assert budget.used_bytes == used
            # Above the limit only with one oversized reservation alone.
            assert used <= 20 or sum(1 for piece in inside if piece.num_bytes) == 1
            check_no_waiter_fits(budget, used)
        for piece in pieces:
            piece.leave()
            await settle()
        assert all(piece.task.done() for piece in pieces)
        assert budget.used_bytes == 0
        # In order of arrival, without the cancelled ones.
        assert log == [piece for piece in pieces if piece in log]


def check_no_waiter_fits(budget: ByteBudget, used: int) -> None:
    waiting = [size for size, grant in budget._queue if not grant.cancelled()]
    if waiting:
        assert used > 0
        assert used + waiting[0] > budget.limit_bytes
