"""How a batch reaches the server: binary, or JSON for an older one; compressed if asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from tinkex import types
from tinkex.client.chunking import DatumChunk
from tinkex.client.holder import Holder
from tinkex.client.jobs import SubmittedJob, submit_job
from tinkex.client.loop import gather_or_cancel
from tinkex.client.transport import PROTO_TYPE, OutgoingRequest, build_request
from tinkex.errors import APIStatusError
from tinkex.wire.codec import encode_json
from tinkex.wire.compression import compress_zstd
from tinkex.wire.endpoints import FORWARD, FORWARD_BACKWARD
from tinkex.wire.proto import encode_forward_backward_request

#: What a server says to a protobuf body that it cannot read.
PROTOBUF_REJECTED_STATUSES = frozenset({400, 415, 422})
#: Smaller bodies are not worth compressing.
MIN_COMPRESS_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PassRequest:
    """One forward or forward_backward, cut into chunks."""

    chunks: list[DatumChunk]
    loss_fn: str
    config: Mapping[str, float | str] | None
    forward_only: bool


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """One request of a batch; the message is kept for a server that wants JSON."""

    message: types.ForwardBackwardRequest
    body: bytes
    num_bytes: int
    forward_only: bool

    @property
    def request_type(self) -> str:
        """What the promise will be called."""
        return "Forward" if self.forward_only else "ForwardBackward"


class PassSender:
    """Sends the batches of one model."""

    def __init__(self, holder: Holder, model_id: str) -> None:
        self._holder = holder
        self._model_id = model_id

    def encode(self, pass_request: PassRequest, first_seq_id: int) -> list[EncodedChunk]:
        """Encode every chunk, in the caller's thread; refuses bad input before anything is sent."""
        return [
            self._encode_chunk(pass_request, chunk, first_seq_id + offset)
            for offset, chunk in enumerate(pass_request.chunks)
        ]

    def _encode_chunk(
        self, pass_request: PassRequest, chunk: DatumChunk, seq_id: int
    ) -> EncodedChunk:
        message = types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(
                data=chunk.data,
                loss_fn=cast("types.LossFnType", pass_request.loss_fn),
                loss_fn_config=dict(pass_request.config)
                if pass_request.config is not None
                else None,
            ),
            model_id=self._model_id,
            seq_id=seq_id,
        )
        body = encode_forward_backward_request(message, pass_request.forward_only)
        return EncodedChunk(message, body, chunk.num_bytes, pass_request.forward_only)

    async def send(self, chunks: list[EncodedChunk]) -> list[SubmittedJob]:
        """Send all chunks, in order; side by side where the server says it sorts them out."""
        if len(chunks) > 1 and self._holder.server.accepts_unordered_chunks:
            return await gather_or_cancel(self._send_one(chunk) for chunk in chunks)
        return [await self._send_one(chunk) for chunk in chunks]

    async def _send_one(self, chunk: EncodedChunk) -> SubmittedJob:
        holder = self._holder
        async with holder.dispatch_budget.reserve(chunk.num_bytes):
            if holder.server.accepts_protobuf is False:
                return await submit_job(
                    holder.transport, self._json_request(chunk), request_type=chunk.request_type
                )
            try:
                promise = await submit_job(
                    holder.transport,
                    await self._protobuf_request(chunk),
                    request_type=chunk.request_type,
                )
            except APIStatusError as error:
                if holder.server.accepts_protobuf or error.status not in PROTOBUF_REJECTED_STATUSES:
                    raise
                # An older server: it has never taken protobuf, and may take JSON.
                promise = await self._resend_as_json(chunk, error)
                holder.server.accepts_protobuf = False
                return promise
        holder.server.accepts_protobuf = True
        return promise

    async def _resend_as_json(self, chunk: EncodedChunk, first: APIStatusError) -> SubmittedJob:
        """Try JSON; if that is refused too, the request was at fault: the first answer says why."""
        try:
            return await submit_job(
                self._holder.transport, self._json_request(chunk), request_type=chunk.request_type
            )
        except APIStatusError as second:
            raise (first if second.is_user_error else second) from second

    async def _protobuf_request(self, chunk: EncodedChunk) -> OutgoingRequest:
        headers = {"content-type": PROTO_TYPE}
        body = chunk.body
        if self._holder.flags.proto_compress_fwdbwd and len(body) >= MIN_COMPRESS_BYTES:
            body = await asyncio.to_thread(compress_zstd, body)
            headers["content-encoding"] = "zstd"
        return build_request(FORWARD_BACKWARD, body, headers=headers)

    def _json_request(self, chunk: EncodedChunk) -> OutgoingRequest:
        if not chunk.forward_only:
            return build_request(FORWARD_BACKWARD, encode_json(chunk.message))
        message = types.ForwardRequest(
            forward_input=chunk.message.forward_backward_input,
            model_id=chunk.message.model_id,
            seq_id=chunk.message.seq_id,
        )
        return build_request(FORWARD, message)
