"""A jump of the wall clock affects neither the server's time nor intervals."""

from __future__ import annotations

import time

import pytest

from tinkex import clock
from tinkex.clock import Clock

HOUR = 3600.0


class Machine:
    """A wall clock that can be set, and a kernel that counts elapsed time."""

    def __init__(self) -> None:
        self.elapsed_seconds = 1000.0
        self.wall_offset = 1.7e9

    def wall(self) -> float:
        return self.elapsed_seconds + self.wall_offset

    def elapsed(self) -> float:
        return self.elapsed_seconds


@pytest.mark.parametrize("jump", [-2 * HOUR, 28 * HOUR])
def test_now_advances_with_elapsed_time_only(jump: float) -> None:
    machine = Machine()
    server = Clock(machine.wall, machine.elapsed)
    start = server.now()
    assert start == machine.wall()
    machine.wall_offset += jump
    machine.elapsed_seconds += 5.0
    assert server.now() == start + 5.0


@pytest.mark.parametrize("jump", [-2 * HOUR, 28 * HOUR])
def test_child_process_uses_the_offset_of_its_parent(jump: float) -> None:
    machine = Machine()
    server = Clock(machine.wall, machine.elapsed)
    machine.wall_offset += jump
    restarted = Clock(machine.wall, machine.elapsed)
    assert restarted.now() == server.now() + jump
    restarted.adopt_offset(server.offset)
    assert restarted.now() == server.now()


def test_clock_agrees_with_the_wall_clock() -> None:
    assert abs(clock.now() - time.time()) < 60.0
    assert abs(clock.utc_now().timestamp() - time.time()) < 60.0


@pytest.mark.parametrize("jump", [-2 * HOUR, 28 * HOUR])
def test_client_deadline_follows_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    real = time.time
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert 0.0 <= clock.now() - before < 60.0
    assert abs(clock.to_wall_time(before + HOUR) - (before + HOUR + jump)) < 60.0
