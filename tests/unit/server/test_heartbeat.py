"""How the supervisor tells a blocked process from a slow one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from tinkex.server.heartbeat import Heartbeat, keep_beating


class Clock:
    """A clock that goes on when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def heartbeat(clock: Clock) -> Iterator[Heartbeat]:
    opened = Heartbeat(60.0, clock)
    yield opened
    opened.close()
    os.close(opened.writing)


def looks(heartbeat: Heartbeat, clock: Clock, seconds: float) -> list[bool]:
    """What is seen during so many seconds without a beat."""
    seen = []
    for _ in range(int(seconds / heartbeat.look_seconds)):
        clock.now += heartbeat.look_seconds
        seen.append(heartbeat.has_stopped())
    return seen


def test_a_process_that_has_not_started_yet_is_not_blocked(
    heartbeat: Heartbeat, clock: Clock
) -> None:
    assert not any(looks(heartbeat, clock, 600.0))


def test_silence_after_a_beat_is_a_blocked_process(heartbeat: Heartbeat, clock: Clock) -> None:
    os.write(heartbeat.writing, b".")
    seen = looks(heartbeat, clock, 70.0)
    assert seen == [False] * 13 + [True]


def test_every_beat_starts_the_count_again(heartbeat: Heartbeat, clock: Clock) -> None:
    for _ in range(10):
        os.write(heartbeat.writing, b"." * 5000)
        assert not any(looks(heartbeat, clock, 55.0))


def test_a_supervisor_that_was_stopped_itself_gives_another_chance(
    heartbeat: Heartbeat, clock: Clock
) -> None:
    os.write(heartbeat.writing, b".")
    looks(heartbeat, clock, 5.0)
    clock.now += 3600.0
    assert not heartbeat.has_stopped()
    assert any(looks(heartbeat, clock, 70.0))


@pytest.mark.asyncio
async def test_a_running_loop_beats_and_a_full_pipe_does_not_block_it(
    heartbeat: Heartbeat,
) -> None:
    os.set_blocking(heartbeat.writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(heartbeat.writing, bytes(65536))
    keep_beating(heartbeat.writing)
    await asyncio.sleep(0)
    assert not heartbeat.has_stopped()
