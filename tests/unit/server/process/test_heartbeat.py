"""The heartbeat monitor distinguishes blocked from slow processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from tinkex.server.process.heartbeat import HeartbeatMonitor, start_heartbeat


class Clock:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def heartbeat(clock: Clock) -> Iterator[HeartbeatMonitor]:
    opened = HeartbeatMonitor(60.0, clock)
    yield opened
    opened.close()
    os.close(opened.write_fd)


def looks(heartbeat: HeartbeatMonitor, clock: Clock, seconds: float) -> list[bool]:
    """Poll the monitor for some seconds without heartbeats."""
    seen = []
    for _ in range(int(seconds / heartbeat.poll_seconds)):
        clock.now += heartbeat.poll_seconds
        seen.append(heartbeat.has_stopped())
    return seen


def test_process_without_first_heartbeat_is_not_blocked(
    heartbeat: HeartbeatMonitor, clock: Clock
) -> None:
    assert not any(looks(heartbeat, clock, 600.0))


def test_missing_heartbeat_means_blocked(heartbeat: HeartbeatMonitor, clock: Clock) -> None:
    os.write(heartbeat.write_fd, b".")
    seen = looks(heartbeat, clock, 70.0)
    assert seen == [False] * 13 + [True]


def test_heartbeat_resets_silence(heartbeat: HeartbeatMonitor, clock: Clock) -> None:
    for _ in range(10):
        os.write(heartbeat.write_fd, b"." * 5000)
        assert not any(looks(heartbeat, clock, 55.0))


def test_suspended_supervisor_resets_silence(heartbeat: HeartbeatMonitor, clock: Clock) -> None:
    os.write(heartbeat.write_fd, b".")
    looks(heartbeat, clock, 5.0)
    clock.now += 3600.0
    assert not heartbeat.has_stopped()
    assert any(looks(heartbeat, clock, 70.0))


@pytest.mark.asyncio
async def test_heartbeat_does_not_block_on_full_pipe(
    heartbeat: HeartbeatMonitor,
) -> None:
    os.set_blocking(heartbeat.write_fd, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(heartbeat.write_fd, bytes(65536))
    start_heartbeat(heartbeat.write_fd)
    await asyncio.sleep(0)
    assert not heartbeat.has_stopped()
