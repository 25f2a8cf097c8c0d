"""Eviction of connections above the limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.server.config import ServerConfig
from tinkex.server.http.connections import ConnectionLimits, ConnectionPhase, ConnectionRegistry


class Line:
    """A connection that records why it was dropped."""

    def __init__(self, peer: str = "a") -> None:
        self.peer = peer
        self.phase = ConnectionPhase.HEAD
        self.dropped = ""

    def drop(self, reason: str) -> None:
        self.dropped = reason

    def expire(self, now: float) -> None:
        """Do nothing: it never times out."""


def registry(max_connections: int = 3, max_per_peer: int = 3) -> ConnectionRegistry:
    return ConnectionRegistry(
        ConnectionLimits(
            max_connections=max_connections,
            max_per_peer=max_per_peer,
            head_seconds=1.0,
            body_seconds=1.0,
        )
    )


@pytest.mark.asyncio
async def test_eviction_order_is_incomplete_then_idle_oldest_first() -> None:
    known = registry()
    idle, first, second = (Line(str(number)) for number in range(3))
    for line in (idle, first, second):
        assert known.admit(line)
    known.set_phase(idle, ConnectionPhase.IDLE)

    newcomers = [Line(f"new {number}") for number in range(3)]
    for newcomer in newcomers:
        assert known.admit(newcomer)
        known.set_phase(newcomer, ConnectionPhase.BUSY)

    assert [line.dropped for line in (first, second, idle)] == ["limit"] * 3
    assert not any(newcomer.dropped for newcomer in newcomers)
    assert len(known) == 3


@pytest.mark.asyncio
async def test_busy_connections_are_never_evicted() -> None:
    known = registry()
    busy = [Line(str(number)) for number in range(3)]
    for line in busy:
        assert known.admit(line)
        known.set_phase(line, ConnectionPhase.BUSY)

    assert not known.admit(Line("late"))
    assert not any(line.dropped for line in busy)


@pytest.mark.asyncio
async def test_peer_limit_evicts_only_own_connections() -> None:
    known = registry(max_connections=10, max_per_peer=2)
    other = Line("b")
    assert known.admit(other)
    mine = [Line("a") for _ in range(4)]
    for line in mine:
        assert known.admit(line)

    assert [line.dropped for line in mine] == ["limit", "limit", "", ""]
    assert other.dropped == ""
    for line in mine[2:]:
        known.set_phase(line, ConnectionPhase.BUSY)
    assert not known.admit(Line("a"))
    assert known.admit(Line("c"))


@pytest.mark.asyncio
async def test_closed_connection_frees_slot() -> None:
    known = registry(max_connections=1)
    first = Line()
    assert known.admit(first)
    known.set_phase(first, ConnectionPhase.BUSY)
    known.remove(first)
    known.remove(first)
    assert len(known) == 0
    assert known.admit(Line())


@pytest.mark.parametrize(
    ("options", "num_descriptors", "expected"),
    [
        ({}, 1024, (768, 384)),
        ({}, 1 << 20, (16_384, 8192)),
        ({}, 64, (16, 8)),
        ({"max_connections": 100}, 1024, (100, 50)),
        ({"max_connections": 5000}, 1024, (768, 384)),
        ({"max_connections": 100, "max_connections_per_peer": 7}, 1024, (100, 7)),
        ({"max_connections_per_peer": 10**6}, 1024, (768, 768)),
    ],
)
def test_connection_limit_is_below_descriptor_limit(
    options: dict[str, int], num_descriptors: int, expected: tuple[int, int]
) -> None:
    config = ServerConfig(home=Path("home"), **options)  # type: ignore[arg-type]
    limits = ConnectionLimits.from_config(config, num_descriptors)
    assert (limits.max_connections, limits.max_per_peer) == expected
