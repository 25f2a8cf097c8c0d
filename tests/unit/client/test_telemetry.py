"""Usage events: queueing, acknowledgement and redaction."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tinkex.client import telemetry as module
from tinkex.client.io_loop import IO_LOOP
from tinkex.client.retry import NO_RETRY, RetryPolicy
from tinkex.client.telemetry import MAX_BATCH_EVENTS, QUEUE_SIZE, Telemetry
from tinkex.errors import APIConnectionError, NotFoundError
from tinkex.types import TelemetrySendRequest
from tinkex.wire.codec import encode_json
from tinkex.wire.endpoints import TELEMETRY, Endpoint


class Server:
    """Accepts or rejects batches."""

    def __init__(self) -> None:
        self.batches: list[TelemetrySendRequest] = []
        self.refusal: Exception | None = None
        self.num_asked = 0

    async def call(
        self, endpoint: Endpoint[Any, Any], message: TelemetrySendRequest, *, policy: RetryPolicy
    ) -> None:
        assert (endpoint, policy) == (TELEMETRY, NO_RETRY)
        self.num_asked += 1
        if self.refusal is not None:
            raise self.refusal
        self.batches.append(message)

    @property
    def events(self) -> list[Any]:
        return [event for batch in self.batches for event in batch.events]


@pytest.fixture
def server() -> Server:
    return Server()


def reporter(server: Server, *secrets: str) -> Telemetry:
    transport: Any = server
    takes_secrets = "secrets" in inspect.signature(Telemetry).parameters
    return Telemetry(transport, lambda: secrets) if takes_secrets else Telemetry(transport)


def on_io(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run on the loop that owns the events."""
    return IO_LOOP.start(work()).result(timeout=60)


def test_events_are_sent_in_order_and_counted(server: Server) -> None:
    telemetry = reporter(server)
    assert telemetry.log("one", {"n": 1})
    assert telemetry.log("two", severity="WARNING")
    on_io(telemetry.flush)
    assert [event.event_name for event in server.events] == ["one", "two"]
    assert [event.event_session_index for event in server.events] == [0, 1]
    assert [event.severity for event in server.events] == ["INFO", "WARNING"]
    assert server.events[0].event_data == {"n": "1"}
    assert telemetry.num_delivered == 2
    assert len({event.event_id for event in server.events}) == 2
    # The whole batch can be encoded.
    assert b'"event":"GENERIC_EVENT"' in encode_json(server.batches[0])


def test_events_without_session_have_sessionless_id(server: Server) -> None:
    telemetry = reporter(server)
    telemetry.log("one")
    on_io(telemetry.flush)
    assert server.batches[0].session_id.startswith("sessionless-")


def test_session_start_and_end_events(server: Server) -> None:
    telemetry = reporter(server)

    async def whole_life() -> None:
        telemetry.begin("s-1")
        await telemetry.end()

    on_io(whole_life)
    assert [event.event for event in server.events] == ["SESSION_START", "SESSION_END"]
    assert {batch.session_id for batch in server.batches} == {"s-1"}


def test_end_without_begin_sends_nothing(server: Server) -> None:
    on_io(reporter(server).end)
    assert server.num_asked == 0


def test_failed_flush_keeps_events_queued(server: Server) -> None:
    telemetry = reporter(server)
    telemetry.log("one")
    server.refusal = APIConnectionError()
    on_io(telemetry.flush)
    assert telemetry.num_delivered == 0
    server.refusal = None
    telemetry.log("two")
    on_io(telemetry.flush)
    assert [event.event_name for event in server.events] == ["one", "two"]
    assert telemetry.num_delivered == 2


def test_batch_size_is_limited(server: Server) -> None:
    telemetry = reporter(server)
    for number in range(2 * MAX_BATCH_EVENTS + 5):
        telemetry.log(f"e{number}")
    on_io(telemetry.flush)
    assert [len(batch.events) for batch in server.batches] == [
        MAX_BATCH_EVENTS,
        MAX_BATCH_EVENTS,
        5,
    ]


def test_404_stops_reporting(server: Server) -> None:
    telemetry = reporter(server)
    telemetry.log("one")
    server.refusal = NotFoundError("no such endpoint")
    on_io(telemetry.flush)
    on_io(telemetry.flush)
    assert server.num_asked == 1
    assert telemetry.log("two") is False
    assert telemetry.log_exception(ValueError("x")) is False
    assert telemetry.num_dropped >= 1


def test_full_queue_drops_and_counts(server: Server) -> None:
    telemetry = reporter(server)

    async def fill() -> None:
        telemetry._events.extend([object()] * QUEUE_SIZE)  # type: ignore[list-item]

    on_io(fill)
    assert telemetry.log("one too many") is False
    assert telemetry.num_dropped == 1


def test_exception_events_are_redacted(server: Server) -> None:
    telemetry = reporter(server)
    try:
        raise ValueError("refused tml-0123456789abcdef and eyJhbGciOiJub25lIn0.e30.x")
    except ValueError as error:
        assert telemetry.log_exception(error)
    telemetry.log("name", {"header": "x-api-key: tml-0123456789abcdef"})
    on_io(telemetry.flush)
    [event, generic] = server.events
    assert (event.event, event.error_type) == ("UNHANDLED_EXCEPTION", "ValueError")
    assert "test_exception_events_are_redacted" in event.traceback
    assert "refused ***" in event.error_message
    wire = encode_json(server.batches[0])
    assert b"tml-0123" not in wire
    assert b"eyJhbGci" not in wire
    assert generic.event_data == {"header": "x-api-key: ***"}


def test_key_without_known_prefix_is_redacted(server: Server) -> None:
    telemetry = reporter(server, "local-key-without-prefix")
    telemetry.log("name", {"text": "sent local-key-without-prefix"})
    telemetry.log_exception(ValueError("sent local-key-without-prefix"))
    on_io(telemetry.flush)
    assert b"local-key" not in encode_json(server.batches[0])


def test_flushes_are_serialized(server: Server) -> None:
    telemetry = reporter(server)
    for number in range(10):
        telemetry.log(f"e{number}")

    async def flush_twice() -> None:
        await asyncio.gather(telemetry.flush(), telemetry.flush())

    on_io(flush_twice)
    assert len(server.events) == telemetry.num_delivered == 10


def test_slow_server_does_not_delay_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit is a module constant, so it is patched.
    monkeypatch.setattr(module, "DRAIN_SECONDS", 0.02)
    telemetry = reporter(server)

    async def hang(*args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(100)

    async def whole_life() -> None:
        telemetry.begin("s-1")
        server.call = hang  # type: ignore[method-assign]
        await telemetry.end()

    on_io(whole_life)
    assert telemetry.num_delivered == 0
