"""Fair start queue: round robin between peers, a few starts per loop iteration."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tinkex.server.http.connections import MAX_FIFO_STARTS, FairStartQueue


async def next_turn() -> None:
    await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_busy_peer_delays_other_peer_by_one_iteration() -> None:
    turns, started = FairStartQueue(2), list[str]()
    for _ in range(1000):
        turns.submit("flood", partial(started.append, "flood"))
    turns.submit("quiet", partial(started.append, "quiet"))
    assert started == ["flood"] * 2
    assert (turns.num_waiting("flood"), turns.num_waiting("quiet"), len(turns)) == (998, 1, 999)

    await next_turn()
    assert started == ["flood"] * 3 + ["quiet"]


@pytest.mark.asyncio
async def test_starts_per_iteration_are_limited() -> None:
    turns, started = FairStartQueue(3), list[int]()
    for number in range(8):
        turns.submit("peer", partial(started.append, number))
    counts = [len(started)]
    for _ in range(3):
        await next_turn()
        counts.append(len(started))
    assert counts == [3, 6, 8, 8]
    assert started == list(range(8))
    assert len(turns) == 0


@pytest.mark.asyncio
async def test_excess_of_long_queue_is_served_newest_first() -> None:
    turns, started = FairStartQueue(1), list[int]()
    for number in range(MAX_FIFO_STARTS + 4):
        turns.submit("peer", partial(started.append, number))
    while turns:
        await next_turn()
    newest = [MAX_FIFO_STARTS + 3, MAX_FIFO_STARTS + 2, MAX_FIFO_STARTS + 1]
    assert started == [0, *newest, *range(1, MAX_FIFO_STARTS + 1)]


@pytest.mark.asyncio
async def test_task_starts_immediately_when_queue_is_empty() -> None:
    turns, started = FairStartQueue(1), list[str]()
    turns.submit("a", partial(started.append, "a"))
    await next_turn()
    await next_turn()
    turns.submit("b", partial(started.append, "b"))
    assert started == ["a", "b"]


@pytest.mark.asyncio
async def test_submission_does_not_overtake_waiting_starts() -> None:
    turns, started = FairStartQueue(1), list[str]()
    for name in ("first", "second", "third"):
        turns.submit("peer", partial(started.append, name))
    await next_turn()
    turns.submit("peer", partial(started.append, "fourth"))
    for _ in range(3):
        await next_turn()
    assert started == ["first", "second", "third", "fourth"]
