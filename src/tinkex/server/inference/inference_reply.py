"""Send the response of an inference request: a body, server-sent events or an error."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator

from litestar.types import Send

from tinkex.server.http.prometheus import FIRST_TOKEN_SECONDS
from tinkex.server.http.request_body import ClientDisconnected
from tinkex.server.http.request_context import RawResponse
from tinkex.server.http.router import send_response
from tinkex.server.inference.error_bodies import (
    ApiFamily,
    Failure,
    InferenceError,
    describe_failure,
    failure_response,
)
from tinkex.server.inference.inference_call import EventStream, InferenceCall

#: How long the head of a stream waits for the first event, to send an early error as a status.
START_SECONDS = 1.0
#: A comment or ping is sent after a silence of this time.
KEEP_ALIVE_SECONDS = 10.0
#: A client that reads nothing for this time has gone, whatever its connection says.
SEND_SECONDS = 120.0
RETRY_SECONDS = 2.0
REQUEST_ID_HEADERS = {ApiFamily.OPENAI: "x-request-id", ApiFamily.ANTHROPIC: "request-id"}
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class OpenStreams:
    """Counts the open streams of a process, in total and per tenant."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        # One tenant cannot take the places of all others.
        self._max_per_tenant = max(1, max_streams // 2)
        self._num_by_tenant: Counter[str] = Counter()

    @contextlib.contextmanager
    def reserve(self, call: InferenceCall[object]) -> Iterator[None]:
        """Count a request that streams while the block runs; raises above the limits."""
        if not getattr(call.request, "stream", False):
            yield
            return
        tenant_id = call.tenant_id
        self._check(tenant_id)
        self._num_by_tenant[tenant_id] += 1
        try:
            yield
        finally:
            self._num_by_tenant[tenant_id] -= 1
            if not self._num_by_tenant[tenant_id]:
                del self._num_by_tenant[tenant_id]

    def _check(self, tenant_id: str) -> None:
        if self._num_by_tenant[tenant_id] >= self._max_per_tenant:
            raise InferenceError(
                f"you have {self._max_per_tenant} open streams, which is the limit; try again when "
                "one has ended",
                status=429,
                retry_after_seconds=RETRY_SECONDS,
            )
        if self._num_by_tenant.total() >= self._max_streams:
            raise InferenceError(
                f"the server has {self._max_streams} open streams, which is the limit; try again",
                status=503,
                retry_after_seconds=RETRY_SECONDS,
            )


class Reply:
    """The response to one request."""

    def __init__(self, family: ApiFamily, request_id: str, send: Send) -> None:
        self.endpoint = "unknown"
        self.status = 500
        self._started_at = time.perf_counter()
        self._sent_at = 0.0
        self._sending_since: float | None = None
        self._family = family
        self._request_id = request_id
        self._send = send

    async def send(self, response: RawResponse) -> None:
        """Send a body."""
        self.status = response.status
        headers = {REQUEST_ID_HEADERS[self._family]: self._request_id, **response.headers}
        await send_response(
            RawResponse(
                status=response.status,
                body=response.body,
                content_type=response.content_type,
                headers=headers,
            ),
            self._send,
        )

    async def send_failure(self, failure: Failure) -> None:
        """Send an error."""
        await self.send(failure_response(self._family, failure, self._request_id))

    async def send_stream(self, stream: EventStream) -> None:
        """Send events as they come; raises only what happens before the head is sent."""
        first = asyncio.ensure_future(anext(stream.chunks, None))
        try:
            await asyncio.wait({first}, timeout=START_SECONDS)
            if first.done():
                first.result()
            await self._send_head(stream)
            async with self._monitor(stream):
                await self._send_chunks(first, stream)
        finally:
            first.cancel()
            await asyncio.wait({first})
            await stream.chunks.aclose()
            stream.close()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_head(self, stream: EventStream) -> None:
        self.status = 200
        headers = {
            **_STREAM_HEADERS,
            REQUEST_ID_HEADERS[self._family]: self._request_id,
            **stream.headers,
        }
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def _send_chunks(self, first: Awaitable[bytes | None], stream: EventStream) -> None:
        chunk = await self._read_chunk(first, stream)
        if chunk is not None:
            seconds = time.perf_counter() - self._started_at
            FIRST_TOKEN_SECONDS.labels(self._family.value).observe(seconds)
        while chunk is not None:
            await self._send_chunk(chunk)
            chunk = await self._read_chunk(anext(stream.chunks, None), stream)

    async def _read_chunk(
        self, reading: Awaitable[bytes | None], stream: EventStream
    ) -> bytes | None:
        try:
            return await reading
        except Exception as error:  # noqa: BLE001 - the client is told in the last event
            await self._send_chunk(stream.encode_error(describe_failure(error, self.endpoint)))
            return None

    async def _send_chunk(self, chunk: bytes) -> None:
        self._sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sent_at, self._sending_since = self._sending_since, None

    # --- slow clients and silences -----------------------------------------------------------
    # One timer per stream instead of one per chunk, because streams have a chunk per token.
    @contextlib.asynccontextmanager
    async def _monitor(self, stream: EventStream) -> AsyncIterator[None]:
        """Send keep-alives in silences; raises ClientDisconnected if a chunk is never read."""
        sender = asyncio.current_task()
        assert sender is not None
        self._sent_at = time.monotonic()
        timer = asyncio.ensure_future(self._watch_sends(stream, sender))
        try:
            yield
        except asyncio.CancelledError:
            if not timer.done():
                raise
            sender.uncancel()
            raise ClientDisconnected(f"the client read nothing for {SEND_SECONDS:g} s") from None
        finally:
            timer.cancel()
            await asyncio.wait({timer})

    async def _watch_sends(self, stream: EventStream, sender: asyncio.Task[object]) -> None:
        """Return when a client is too slow, after its sender was cancelled."""
        while True:
            since, limit = self._sending_since, SEND_SECONDS
            if since is None:
                since, limit = self._sent_at, KEEP_ALIVE_SECONDS
            seconds = since + limit - time.monotonic()
            if seconds > 0:
                await asyncio.sleep(min(seconds, SEND_SECONDS, KEEP_ALIVE_SECONDS))
            elif self._sending_since is None:
                await self._send_keep_alive(stream)
            else:
                sender.cancel()
                return

    async def _send_keep_alive(self, stream: EventStream) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEND_SECONDS):
                await self._send_chunk(stream.keep_alive)
