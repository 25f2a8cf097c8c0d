"""Tokens of a sample as the server generates them, through its streaming endpoint.

Only some servers have the endpoint; callers fall back to sample() if it raises StreamUnavailable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Sequence
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

import msgspec

from tinkex.client.holder import Holder
from tinkex.client.http import HttpStream
from tinkex.errors import (
    APIConnectionError,
    RequestFailedError,
    ResultTimeoutError,
    TinkexError,
)
from tinkex.types import SamplingParams

PATH = "/v1/completions"
#: The server sends a comment after 10 s of silence.
SILENCE_SECONDS = 60.0
MAX_EVENT_BYTES = 2**22
#: Statuses of servers without the endpoint.
_UNAVAILABLE_STATUSES = frozenset({404, 405, 501})


class StreamUnavailable(TinkexError):
    """The server does not stream samples."""


class TokenChunk(NamedTuple):
    """The next tokens of a sample."""

    tokens: list[int]
    stop_reason: Literal["stop", "length"] | None = None
    """Why the sample ended; None before its end."""


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str = ""


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: _ErrorBody | None = None


class TokenStreamer:
    """Streams samples of one model."""

    def __init__(self, holder: Holder, model: str) -> None:
        self.is_available = True
        """False once the server turned out not to stream."""
        self._holder = holder
        self._model = model

    def stream(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> Generator[TokenChunk, None, None]:
        """Yield tokens as they arrive; leaving the iterator cancels the sample on the server."""
        if not self.is_available:
            raise StreamUnavailable
        received: SimpleQueue[TokenChunk | None] = SimpleQueue()
        body = self._build_body(prompt, params)
        future = self._holder.start(self._receive(body, received))
        future.add_done_callback(lambda done: received.put(None))
        try:
            while (chunk := _take(received)) is not None:
                yield chunk
            future.result()
        except StreamUnavailable:
            self.is_available = False
            raise
        finally:
            future.cancel()

    def _build_body(self, prompt: Sequence[int], params: SamplingParams) -> bytes:
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "seed": params.seed,
                "stop": params.stop,
                "stream": True,
                "return_token_ids": True,
            }
        )

    async def _receive(self, body: bytes, received: SimpleQueue[TokenChunk | None]) -> None:
        await self._holder.ready()
        transport, config = self._holder.transport, self._holder.config
        url = config.base_url + PATH
        headers = {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(config.poll_timeout_seconds),
                transport.stream(url, headers, SILENCE_SECONDS, body=body) as stream,
            ):
                await self._check_head(stream)
                await _read_chunks(stream, received)
        except TimeoutError as error:
            if isinstance(error, TinkexError):
                raise
            raise ResultTimeoutError(message="The sample did not end in time") from error

    async def _check_head(self, stream: HttpStream) -> None:
        content_type = stream.headers.get("content-type", "")
        if stream.status == 200 and content_type.startswith("text/event-stream"):
            return
        response = await stream.read(MAX_EVENT_BYTES)
        if response.status_code in _UNAVAILABLE_STATUSES or response.status_code < 400:
            raise StreamUnavailable
        raise self._holder.transport.error_from_response(response)


def _take(received: SimpleQueue[TokenChunk | None]) -> TokenChunk | None:
    """Wait for the next tokens, and join all that have arrived; None at the end."""
    chunk = received.get()
    while chunk is not None and chunk.stop_reason is None:
        try:
            following = received.get_nowait()
        except Empty:
            return chunk
        if following is None:
            # The end is the next item again.
            received.put(None)
            return chunk
        chunk = TokenChunk([*chunk.tokens, *following.tokens], following.stop_reason)
    return chunk


async def _read_chunks(stream: HttpStream, received: SimpleQueue[TokenChunk | None]) -> None:
    has_tokens = False
    async for event in _read_events(stream):
        if event.error is not None:
            raise RequestFailedError(event.error.message or "The server ended the stream")
        for choice in event.choices:
            has_tokens = has_tokens or bool(choice.token_ids)
            if choice.text and not has_tokens:
                # A server that ignores return_token_ids.
                raise StreamUnavailable
            received.put(TokenChunk(choice.token_ids or [], _stop_reason(choice.finish_reason)))
            if choice.finish_reason is not None:
                return
    raise APIConnectionError(message="The stream ended before the sample was complete")


def _stop_reason(finish_reason: str | None) -> Literal["stop", "length"] | None:
    if finish_reason is None:
        return None
    return "length" if finish_reason == "length" else "stop"


async def _read_events(stream: HttpStream) -> AsyncIterator[_Event]:
    """Yield the server-sent events of a stream; comments are skipped."""
    decode = msgspec.json.Decoder(_Event).decode
    pending = b""
    async for part in stream.chunks():
        *lines, pending = (pending + part).split(b"\n")
        if len(pending) > MAX_EVENT_BYTES:
            raise APIConnectionError(message="The server sent an event that is too long")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            try:
                event = decode(data)
            except msgspec.DecodeError as error:
                raise StreamUnavailable from error
            yield event
