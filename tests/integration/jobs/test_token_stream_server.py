"""The worker's socket for token streams: authentication, limits, slow readers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from tinkex.engine.protocol import SampleProgress
from tinkex.jobs import token_stream_server
from tinkex.jobs.token_stream_messages import (
    MAX_FRAME_BYTES,
    Challenge,
    Finished,
    FrameDecoder,
    Handshake,
    Message,
    Progress,
    Proof,
    Started,
    Unwatch,
    Watch,
    encode_frame,
)
from tinkex.jobs.token_stream_server import MAX_BUFFER_BYTES, TokenStreamServer

SECRET = b"secret"
LIMIT_SECONDS = 30.0


class Client:
    """A connection to a server."""

    def __init__(self, server: TokenStreamServer, stack: contextlib.ExitStack) -> None:
        host, port = server.address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), LIMIT_SECONDS)
        stack.callback(self.socket.close)
        self.decoder = FrameDecoder(MAX_FRAME_BYTES)
        self.received: list[Message] = []

    def send(self, *messages: Message) -> None:
        self.socket.sendall(encode_frame(messages))

    def receive(self) -> Message | None:
        """The next message; None if the server closed the connection."""
        while not self.received:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self.received += self.decoder.feed(data)
        return self.received.pop(0)

    def authenticate(self, secret: bytes = SECRET) -> None:
        handshake = Handshake(secret)
        challenge = self.receive()
        assert isinstance(challenge, Challenge)
        self.send(Proof(handshake.nonce, handshake.sign("api", challenge.nonce)))
        proof = self.receive()
        assert isinstance(proof, Proof)
        handshake.check("worker", challenge.nonce, proof.signature)


@pytest.fixture
def server() -> Iterator[TokenStreamServer]:
    opened = TokenStreamServer(SECRET)
    yield opened
    opened.close()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


@pytest.fixture
def client(server: TokenStreamServer, stack: contextlib.ExitStack) -> Client:
    opened = Client(server, stack)
    opened.authenticate()
    return opened


def wait_until_watched(server: TokenStreamServer, *job_ids: str) -> None:
    missing = set(job_ids)
    deadline = time.monotonic() + LIMIT_SECONDS
    while missing and time.monotonic() < deadline:
        missing -= set(server.take_changes().watched)
        time.sleep(0.001)
    assert not missing


def wait_until_inactive(server: TokenStreamServer) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while server.is_active and time.monotonic() < deadline:
        server.take_changes()
        time.sleep(0.001)
    assert not server.is_active


def test_nothing_is_active_until_a_job_is_watched(
    server: TokenStreamServer, client: Client
) -> None:
    assert not server.is_active
    client.send(Watch("job"))
    wait_until_watched(server, "job")
    assert server.is_active
    assert server.start_job("job", 1)
    assert not server.start_job("other", 1)
    part = SampleProgress("job", 0, 0, (1,), (-0.5,))
    server.send_progress([part, SampleProgress("other", 0, 0, (2,), ())])
    server.finish_job("job")
    received = [client.receive() for _ in range(3)]
    assert received == [Started("job", 1), Progress([part]), Finished("job")]
    assert not server.is_active


def test_a_watch_ends_with_its_connection(server: TokenStreamServer, client: Client) -> None:
    client.send(Watch("kept"), Watch("dropped"), Unwatch("dropped"))
    wait_until_watched(server, "kept")
    client.socket.close()
    wait_until_inactive(server)


@pytest.mark.parametrize(
    "first",
    [
        encode_frame([Watch("job")]),
        encode_frame([Proof(b"n" * 32, b"s" * 32)]),
        encode_frame([Started("job", 1)]),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x01\xc1",
    ],
)
def test_strangers_are_disconnected(
    server: TokenStreamServer, stack: contextlib.ExitStack, first: bytes
) -> None:
    stranger = Client(server, stack)
    assert isinstance(stranger.receive(), Challenge)
    stranger.socket.sendall(first)
    assert stranger.receive() is None
    assert not server.is_active


def test_a_connection_that_sends_nothing_is_closed(
    server: TokenStreamServer, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream_server, "HANDSHAKE_SECONDS", 0.1)
    silent = Client(server, stack)
    assert isinstance(silent.receive(), Challenge)
    assert silent.receive() is None


def test_watches_and_connections_are_limited(
    server: TokenStreamServer,
    client: Client,
    stack: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_stream_server, "MAX_WATCHES", 2)
    monkeypatch.setattr(token_stream_server, "MAX_CONNECTIONS", 1)
    client.send(Watch("a"), Watch("b"), Watch("c"))
    wait_until_watched(server, "a", "b")
    assert not server.start_job("c", 1)
    assert Client(server, stack).receive() is None


def test_watches_of_jobs_that_run_elsewhere_expire(
    server: TokenStreamServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream_server, "WATCH_SECONDS", 0.05)
    client.send(Watch("elsewhere"))
    wait_until_watched(server, "elsewhere")
    wait_until_inactive(server)


def test_a_slow_reader_loses_progress_and_blocks_nobody(
    server: TokenStreamServer, client: Client, stack: contextlib.ExitStack
) -> None:
    other = Client(server, stack)
    other.authenticate()
    client.send(Watch("job"))
    wait_until_watched(server, "job")
    server.start_job("job", 1)
    tokens, logprobs = tuple(range(1000)), (-0.5,) * 1000
    started_at = time.monotonic()
    offset = 0
    while not server.num_dropped:
        server.send_progress([SampleProgress("job", 0, offset, tokens, logprobs)])
        offset += len(tokens)
        assert offset * 9 < 200 * MAX_BUFFER_BYTES, "the buffers of the kernel are limited"
    assert time.monotonic() - started_at < LIMIT_SECONDS
    # Another connection is served meanwhile.
    other.send(Watch("job"))
    wait_until_watched(server, "job")
    last = SampleProgress("job", 0, offset, (1,), (-0.5,))
    server.send_progress([last])
    assert other.receive() == Progress([last])
    # The slow reader notices the gap by an offset, as soon as something fits into its buffer.
    expected, has_gap = 0, False
    assert client.receive() == Started("job", 1)
    while not has_gap:
        message = client.receive()
        assert isinstance(message, Progress)
        (part,) = message.parts
        has_gap = part.offset != expected
        expected = part.offset + len(part.tokens)
        server.send_progress([last])
    assert part == last
