"""How a batch reaches the server: binary, or JSON for an older one; compressed if asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from tinkex import types
from tinkex.client.chunking import DatumChunk, merge_outputs, split_chunks
from tinkex.client.custom_loss import (
    SurrogateLoss,
    compute_surrogate,
    forward_data,
    with_custom_metrics,
)
from tinkex.client.future import APIFuture
from tinkex.client.holder import Holder
from tinkex.client.io_loop import gather_or_cancel
from tinkex.client.ordered_queue import OrderedQueue
from tinkex.client.queue_state import QueueStateLogger
from tinkex.client.submission import SubmittedJob, submit_job, wait_for_result
from tinkex.client.transport import PROTO_TYPE, OutgoingRequest, build_request
from tinkex.errors import APIStatusError, InvalidInput
from tinkex.ids import check_name, check_ttl
from tinkex.wire.codec import compress_zstd, encode_json
from tinkex.wire.endpoints import FORWARD, FORWARD_BACKWARD, Endpoint
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


T = TypeVar("T")
PassOutput = types.ForwardBackwardOutput


class RemoteModel:
    """The order of operations of one model, and how each travels."""

    def __init__(self, holder: Holder, model_id: str) -> None:
        self._holder = holder
        self._poller = holder.poller(QueueStateLogger("training", model_id), model_id)
        self._queue = OrderedQueue(holder)
        self._sender = PassSender(holder, model_id)
        self._loss_thread: ThreadPoolExecutor | None = None

    def submit_request(
        self, endpoint: Endpoint[Any, Any], build_message: Callable[[int], object]
    ) -> APIFuture[Any]:
        """An operation of one request; `message_for(seq_id)` makes its message."""
        transport = self._holder.transport

        def prepare(seq_id: int) -> Callable[[], Awaitable[SubmittedJob]]:
            request = build_request(endpoint, build_message(seq_id))
            return lambda: submit_job(transport, request)

        def receive(promise: SubmittedJob) -> Awaitable[Any]:
            return wait_for_result(self._poller, promise)

        return self._queue.submit(endpoint.name, 1, prepare, receive)

    def submit_pass(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> APIFuture[PassOutput]:
        """A forward or forward_backward over any number of datums."""
        # A copy: the caller may reuse its list as soon as this returns.
        batch = PassRequest(self._split_chunks(list(data)), loss_fn, config, forward_only)

        def prepare(first: int) -> Callable[[], Awaitable[list[SubmittedJob]]]:
            requests = self._sender.encode(batch, first)
            return lambda: self._sender.send(requests)

        name = "forward" if forward_only else "forward_backward"
        return self._queue.submit(name, len(batch.chunks), prepare, self._wait_and_merge)

    def submit_custom_loss(
        self, data: Sequence[types.Datum], loss_fn: Any
    ) -> APIFuture[PassOutput]:
        """A forward, the user's loss on a thread of its own, then its gradient as a backward.

        All three hold the road, so a later optim_step cannot pass the backward. Its ids are
        reserved with the forward's: both are cut alike.
        """
        data = list(data)
        chunks = self._split_chunks(forward_data(data))
        count = len(chunks)

        def prepare(
            first: int,
        ) -> Callable[[], Awaitable[tuple[list[SubmittedJob], SurrogateLoss]]]:
            forward = PassRequest(chunks, "cross_entropy", None, forward_only=True)
            requests = self._sender.encode(forward, first)

            async def send() -> tuple[list[SubmittedJob], SurrogateLoss]:
                outputs = (
                    await self._wait_and_merge(await self._sender.send(requests))
                ).loss_fn_outputs
                surrogate = await self._on_loss_thread(compute_surrogate, data, outputs, loss_fn)
                again = _split_like(chunks, surrogate.data)
                backward = PassRequest(again, "cross_entropy", None, forward_only=False)
                encoded = await self._on_loss_thread(self._sender.encode, backward, first + count)
                return await self._sender.send(encoded), surrogate

            return send

        async def receive(sent: tuple[list[SubmittedJob], SurrogateLoss]) -> PassOutput:
            return with_custom_metrics(await self._wait_and_merge(sent[0]), sent[1])

        return self._queue.submit("forward_backward_custom", 2 * count, prepare, receive)

    async def _on_loss_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run user code on a thread that serves nothing else; the road allows one at a time."""
        if self._loss_thread is None:
            self._loss_thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-loss")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._loss_thread, partial(work, *args))

    def _split_chunks(self, data: list[types.Datum]) -> list[DatumChunk]:
        for index, datum in enumerate(data):
            if not isinstance(datum, types.Datum):
                raise InvalidInput(f"data[{index}] is no Datum: {type(datum).__name__}")
        flags = self._holder.flags
        return split_chunks(data, flags.fwdbwd_max_chunk_len, flags.fwdbwd_max_chunk_bytes_count)

    async def _wait_and_merge(self, submitted: list[SubmittedJob]) -> PassOutput:
        """Wait for all chunks at once; the first failure stops the waiting for the rest."""
        return merge_outputs(
            await gather_or_cancel(wait_for_result(self._poller, promise) for promise in submitted)
        )


def _split_like(chunks: list[DatumChunk], data: list[types.Datum]) -> list[DatumChunk]:
    """The same cut applied to other datums."""
    cut: list[DatumChunk] = []
    start = 0
    for chunk in chunks:
        end = start + len(chunk.data)
        cut.append(DatumChunk(data[start:end], chunk.num_bytes))
        start = end
    return cut


def check_save_arguments(name: str, ttl_seconds: int | None) -> None:
    """Refuse a checkpoint's name or lifetime before anything is sent."""
    check_name(name)
    check_ttl(ttl_seconds)
