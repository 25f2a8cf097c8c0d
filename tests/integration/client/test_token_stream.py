"""Tokens of a sample as a server sends them, well-formed or not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tests.support.http_server import SmallServer
from tinkex import SamplingParams
from tinkex.client.config import Config
from tinkex.client.holder import Holder
from tinkex.client.token_stream import StreamUnavailable, TokenChunk, TokenStreamer
from tinkex.errors import APIConnectionError, RateLimitError, RequestFailedError, ResultTimeoutError

PARAMS = SamplingParams(max_tokens=8, temperature=0.5, seed=3)
KEY = "tml-alice"
TIMEOUT_SECONDS = 30.0


class Endpoint(BaseHTTPRequestHandler):
    """Answers every GET with 404, and a completion with what the test prepared."""

    hub: Any

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/completions":
            self.send_error(404)
            return
        self.hub.requests.append((self.headers, json.loads(body)))
        status, content_type, parts = self.hub.answer
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.end_headers()
        for part in parts:
            self.wfile.write(part)
            self.wfile.flush()

    def log_message(self, *words: object) -> None:
        """Write nothing."""


Answer = Callable[..., TokenStreamer]


@pytest.fixture
def hub() -> Iterator[Any]:
    server = SmallServer(Endpoint)
    server.requests = []  # type: ignore[attr-defined]
    with closing(server):
        yield server


@pytest.fixture
def answer(hub: Any) -> Iterator[Answer]:
    holder = Holder(Config.new(base_url=hub.url, api_key=KEY))

    def prepare(*parts: bytes, status: int = 200, kind: str = "text/event-stream") -> Any:
        hub.answer = (status, kind, parts)
        return TokenStreamer(holder, "tinkex/tiny")

    yield prepare
    holder.close("success").result(TIMEOUT_SECONDS)


def event(**choice: object) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


WHOLE = (
    event(text="a", token_ids=[1, 2])
    + b": keep-alive\n\n"
    + event(text="", token_ids=[3])
    + event(text="b", token_ids=[4], finish_reason="length")
    + b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_may_be_cut_anywhere(answer: Answer, size: int) -> None:
    parts = [WHOLE[i : i + size] for i in range(0, len(WHOLE), size)]
    chunks = list(answer(*parts).stream([5, 6], PARAMS))
    assert tokens_of(chunks) == [1, 2, 3, 4]
    assert [chunk.stop_reason for chunk in chunks][-1] == "length"
    assert not any(chunk.stop_reason for chunk in chunks[:-1])


def test_the_request(answer: Answer, hub: Any) -> None:
    list(answer(WHOLE).stream([5, 6], PARAMS))
    headers, body = hub.requests[0]
    assert headers["x-api-key"] == KEY
    assert body == {
        "model": "tinkex/tiny",
        "prompt": [5, 6],
        "max_tokens": 8,
        "temperature": 0.5,
        "top_k": -1,
        "top_p": 1,
        "seed": 3,
        "stop": None,
        "stream": True,
        "return_token_ids": True,
    }


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ((b'{"detail": "no such endpoint"}',), {"status": 404, "kind": "application/json"}),
        ((b"<html>hello</html>",), {"kind": "text/html"}),
        ((b'{"choices": []}',), {"kind": "application/json"}),
        ((event(text="a"),), {}),
        ((b"data: what?\n\n",), {}),
    ],
)
def test_other_servers_do_not_stream(
    answer: Answer, hub: Any, parts: tuple[bytes, ...], options: dict[str, Any]
) -> None:
    streamer = answer(*parts, **options)
    with pytest.raises(StreamUnavailable):
        list(streamer.stream([1], PARAMS))
    with pytest.raises(StreamUnavailable):
        list(streamer.stream([1], PARAMS))
    assert len(hub.requests) == 1, "the server is not asked again"


def test_errors_are_raised(answer: Answer) -> None:
    refused = answer(b'{"error": {"message": "slow down"}}', status=429, kind="application/json")
    with pytest.raises(RateLimitError, match="slow down"):
        list(refused.stream([1], PARAMS))
    assert refused.is_available
    failed = answer(event(text="a", token_ids=[1]) + b'data: {"error": {"message": "gone"}}\n\n')
    with pytest.raises(RequestFailedError, match="gone"):
        list(failed.stream([1], PARAMS))
    cut = answer(event(text="a", token_ids=[1]))
    with pytest.raises(APIConnectionError, match="before the sample was complete"):
        list(cut.stream([1], PARAMS))


def test_a_stream_that_does_not_end_in_time(hub: Any) -> None:
    def never() -> Iterator[bytes]:
        yield event(text="a", token_ids=[1])
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline and not hub.is_over:
            yield b": keep-alive\n\n"
            time.sleep(0.01)

    hub.answer, hub.is_over = (200, "text/event-stream", never()), False
    holder = Holder(Config.new(base_url=hub.url, api_key=KEY, poll_timeout_seconds=0.2))
    stream = TokenStreamer(holder, "m").stream([1], PARAMS)
    assert next(stream).tokens == [1]
    with pytest.raises(ResultTimeoutError):
        next(stream)
    hub.is_over = True
    holder.close("success").result(TIMEOUT_SECONDS)
