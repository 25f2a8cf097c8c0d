"""Requests start round robin between peers; those of closed connections are dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tinkex.server.http.connection_protocol import MAX_PIPELINED, LimitedHttpProtocol
from tinkex.server.http.connections import ConnectionLimits, ConnectionRegistry

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Pipe(asyncio.Transport):
    """A transport that records what is written."""

    def __init__(self, peer: str) -> None:
        super().__init__({"peername": (peer, 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        """Do nothing: data is fed by the test."""

    def resume_reading(self) -> None:
        """Do nothing: data is fed by the test."""


class Peers:
    """An application that records the peers of its requests."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        limits = ConnectionLimits(
            max_connections=99, max_per_peer=99, head_seconds=9.0, body_seconds=9.0
        )
        self.connections = ConnectionRegistry(limits)
        self._config = uvicorn.Config(
            self._app, interface="asgi3", log_config=None, access_log=False
        )
        self._config.load()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope["client"][0])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def send(self, peer: str, data: bytes) -> Pipe:
        pipe = Pipe(peer)
        protocol = LimitedHttpProtocol(
            self._config, ServerState(), {}, None, connections=self.connections
        )
        protocol.connection_made(pipe)
        protocol.data_received(data)
        return pipe


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_requests_are_served_round_robin_between_peers() -> None:
    peers = Peers()
    for _ in range(20):
        peers.send("flood", GET)
    peers.send("quiet", GET)
    await settle()
    # Two start at once, and then one of each peer.
    assert peers.seen.index("quiet") == 3
    assert peers.seen.count("flood") == 20


@pytest.mark.asyncio
async def test_requests_of_closed_connection_are_dropped() -> None:
    peers = Peers()
    peers.send("busy", GET)
    peers.send("busy", GET)
    pipe = peers.send("flood", GET * (MAX_PIPELINED + 2))
    await settle()
    assert peers.seen == ["busy", "busy"]
    assert pipe.written.startswith(b"HTTP/1.1 429 ")
    assert pipe.written.count(b"HTTP/1.1") == 1
