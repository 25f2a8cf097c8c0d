"""Waiting connections start round robin between addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.integration.conftest import TIMEOUT_SECONDS
from tinkex.server.http import connections as accepting
from tinkex.server.http.connections import Acceptor, ConnectionLimits, ConnectionRegistry

FLOOD, QUIET = "127.0.0.2", "127.0.0.1"


class RecordingProtocol(asyncio.Protocol):
    """Records the addresses of connections in start order."""

    def __init__(self, peers: list[str]) -> None:
        self._peers = peers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._peers.append(transport.get_extra_info("peername")[0])
        transport.close()


def registry() -> ConnectionRegistry:
    return ConnectionRegistry(
        ConnectionLimits(max_connections=99, max_per_peer=99, head_seconds=9.0, body_seconds=9.0)
    )


@contextlib.contextmanager
def waiting(*peers: str) -> Iterator[tuple[socket.socket, list[socket.socket]]]:
    """A listener with waiting connections from these addresses."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((QUIET, 0), backlog=len(peers)))
        clients = [
            stack.enter_context(
                socket.create_connection(
                    listener.getsockname(), timeout=TIMEOUT_SECONDS, source_address=(peer, 0)
                )
            )
            for peer in peers
        ]
        yield listener, clients


async def accept(listener: socket.socket, num_starts: int) -> list[str]:
    """The addresses of the first connections, in start order."""
    peers: list[str] = []
    acceptor = Acceptor(listener, registry(), lambda: RecordingProtocol(peers))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while len(peers) < num_starts:
            await asyncio.sleep(0)
    acceptor.close()
    await acceptor.wait_closed()
    return peers


@pytest.mark.asyncio
async def test_accept_queue_is_fair_between_addresses() -> None:
    with waiting(*[FLOOD] * 40, QUIET) as (listener, _):
        peers = await accept(listener, 41)
    # Two start at once; then one of each address.
    assert peers.index(QUIET) <= 4
    assert peers.count(FLOOD) == 40


@pytest.mark.asyncio
async def test_accept_queue_limit_per_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepting, "MAX_WAITING_PER_PEER", 3)
    with waiting(*[FLOOD] * 20, QUIET) as (listener, clients):
        peers = await accept(listener, 6)
        assert sorted(peers) == [QUIET] + [FLOOD] * 5
        assert all(client.recv(1) == b"" for client in clients)


@pytest.mark.asyncio
async def test_queued_connections_are_closed_with_listener() -> None:
    with waiting(*[FLOOD] * 20) as (listener, clients):
        connections = registry()
        peers: list[str] = []
        acceptor = Acceptor(listener, connections, lambda: RecordingProtocol(peers))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not len(connections.start_queue):
                await asyncio.sleep(0)
            acceptor.close()
            while len(connections.start_queue):
                await asyncio.sleep(0)
            await acceptor.wait_closed()
            await asyncio.sleep(0.01)
        assert len(peers) < 20
        assert all(client.recv(1) == b"" for client in clients)


class NoDescriptorsSocket:
    """A listener that fails once for lack of descriptors."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.num_refused = 0

    def accept(self) -> tuple[socket.socket, object]:
        if not self.num_refused:
            self.num_refused += 1
            raise OSError(24, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._listener, name)


@pytest.mark.asyncio
async def test_accept_pauses_without_file_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepting, "RETRY_SECONDS", 0.0)
    with waiting(QUIET) as (listener, _):
        exhausted = NoDescriptorsSocket(listener)
        assert await accept(exhausted, 1) == [QUIET]  # type: ignore[arg-type]
        assert exhausted.num_refused == 1
