"""Send the response of an inference request: a body, server-sent events or an error."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator

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
        self._has_sent_chunk = False
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
        chunks = stream.chunks
        pending = asyncio.ensure_future(anext(chunks, None))
        try:
            await asyncio.wait({pending}, timeout=START_SECONDS)
            if pending.done():
                pending.result()
            await self._send_head(stream)
            while (chunk := await self._next_chunk(pending, stream)) is not None:
                await self._send_chunk(chunk)
                pending = asyncio.ensure_future(anext(chunks, None))
        finally:
            pending.cancel()
            await asyncio.wait({pending})
            await chunks.aclose()
            stream.close()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next_chunk(
        self, pending: asyncio.Future[bytes | None], stream: EventStream
    ) -> bytes | None:
        while not pending.done():
            done, _ = await asyncio.wait({pending}, timeout=KEEP_ALIVE_SECONDS)
            if not done:
                await self._send_chunk(stream.keep_alive)
        error = pending.exception()
        if error is not None:
            await self._send_chunk(stream.encode_error(describe_failure(error, self.endpoint)))
            return None
        if not self._has_sent_chunk:
            self._has_sent_chunk = True
            seconds = time.perf_counter() - self._started_at
            FIRST_TOKEN_SECONDS.labels(self._family.value).observe(seconds)
        return pending.result()

    async def _send_head(self, stream: EventStream) -> None:
        self.status = 200
        headers = {
            **_STREAM_HEADERS,
            REQUEST_ID_HEADERS[self._family]: self._request_id,
            **stream.headers,
        }
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def _send_chunk(self, chunk: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise ClientDisconnected(f"the client read nothing for {SEND_SECONDS:g} s") from None
