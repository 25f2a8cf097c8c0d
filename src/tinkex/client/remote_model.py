"""Submit the operations of one model: encode in the caller's thread, send in call order.

A batch is split into chunks. Chunks are sent as protobuf, or as JSON to older servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar, cast

from tinkex import types
from tinkex.client.chunking import DatumChunk, merge_outputs, split_chunks
from tinkex.client.custom_loss import (
    CustomLossFnV1,
    LossHandle,
    SurrogateLoss,
    compute_surrogate,
    forward_data,
    with_custom_metrics,
)
from tinkex.client.future import APIFuture
from tinkex.client.holder import Holder
from tinkex.client.io_loop import gather_or_cancel
from tinkex.client.ordered_queue import OrderedQueue
from tinkex.client.polling import SubmittedJob
from tinkex.client.queue_state import QueueStateLogger
from tinkex.client.submission import submit_job
from tinkex.client.transport import PROTO_TYPE
from tinkex.errors import APIStatusError, InvalidInput
from tinkex.wire.codec import compress_zstd, encode_json
from tinkex.wire.endpoints import FORWARD, FORWARD_BACKWARD, JobEndpoint
from tinkex.wire.proto import encode_forward_backward_request

T = TypeVar("T")
ResultT = TypeVar("ResultT")
PassOutput: TypeAlias = types.ForwardBackwardOutput
PassJob: TypeAlias = SubmittedJob[PassOutput]

#: Statuses of a server that cannot read a protobuf body.
PROTOBUF_REJECTED_STATUSES = frozenset({400, 415, 422})
#: Smaller bodies are not worth compressing.
MIN_COMPRESS_BYTES = 4096


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """One request of a forward or forward_backward call, encoded as protobuf."""

    message: types.ForwardBackwardRequest
    """The message itself, for servers that need JSON."""
    body: bytes
    num_bytes: int
    forward_only: bool

    @property
    def request_type(self) -> str:
        """The kind of job, as the poll headers spell it."""
        return "Forward" if self.forward_only else "ForwardBackward"

    def json_request(self) -> tuple[JobEndpoint[object, PassOutput], object]:
        """The endpoint and the message for servers that need JSON."""
        if not self.forward_only:
            return FORWARD_BACKWARD, self.message
        message = types.ForwardRequest(
            forward_input=self.message.forward_backward_input,
            model_id=self.message.model_id,
            seq_id=self.message.seq_id,
        )
        return FORWARD, message


class RemoteModel:
    """Sends the operations of one model in call order and waits for their results."""

    def __init__(self, holder: Holder, model_id: str) -> None:
        self._holder = holder
        self._model_id = model_id
        self._poller = holder.poller(QueueStateLogger("training", model_id), model_id)
        self._queue = OrderedQueue(holder)
        self._loss_thread: ThreadPoolExecutor | None = None

    def submit_request(
        self, endpoint: JobEndpoint[object, ResultT], build_message: Callable[[int], object]
    ) -> APIFuture[ResultT]:
        """Submit an operation of one request; `build_message(seq_id)` returns its message."""

        def prepare(seq_id: int) -> Callable[[], Coroutine[object, None, SubmittedJob[ResultT]]]:
            body = encode_json(build_message(seq_id))
            return lambda: submit_job(self._holder.transport, endpoint, body)

        return self._queue.submit(endpoint.name, 1, prepare, self._poller.wait)

    def submit_pass(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> APIFuture[PassOutput]:
        """Submit a forward or forward_backward over any number of datums."""
        # A copy: the caller may reuse its list as soon as this returns.
        chunks = self._split_chunks(list(data))

        def prepare(first_seq_id: int) -> Callable[[], Coroutine[object, None, list[PassJob]]]:
            encoded = self._encode(
                chunks, first_seq_id, loss_fn=loss_fn, config=config, forward_only=forward_only
            )
            return lambda: self._send(encoded)

        name = "forward" if forward_only else "forward_backward"
        return self._queue.submit(name, len(chunks), prepare, self._wait_and_merge)

    def submit_custom_loss(
        self, data: Sequence[types.Datum], loss_fn: CustomLossFnV1 | LossHandle
    ) -> APIFuture[PassOutput]:
        """Submit a forward pass, run the user's loss locally, submit its gradient as a backward.

        The queue sends nothing else meanwhile, so a later optim_step cannot overtake the backward
        pass. Both passes have the same chunks, and their seq ids are reserved together.
        """
        data = list(data)
        chunks = self._split_chunks(forward_data(data))
        num_chunks = len(chunks)

        def prepare(
            first_seq_id: int,
        ) -> Callable[[], Coroutine[object, None, tuple[list[PassJob], SurrogateLoss]]]:
            encoded = self._encode(chunks, first_seq_id, forward_only=True)

            async def send() -> tuple[list[PassJob], SurrogateLoss]:
                forward = await self._wait_and_merge(await self._send(encoded))
                surrogate = await self._on_loss_thread(
                    compute_surrogate, data, forward.loss_fn_outputs, loss_fn
                )
                backward = await self._on_loss_thread(
                    self._encode,
                    _split_like(chunks, surrogate.data),
                    first_seq_id + num_chunks,
                    forward_only=False,
                )
                return await self._send(backward), surrogate

            return send

        async def receive(sent: tuple[list[PassJob], SurrogateLoss]) -> PassOutput:
            jobs, surrogate = sent
            return with_custom_metrics(await self._wait_and_merge(jobs), surrogate)

        return self._queue.submit("forward_backward_custom", 2 * num_chunks, prepare, receive)

    def _split_chunks(self, data: list[types.Datum]) -> list[DatumChunk]:
        for index, datum in enumerate(data):
            if not isinstance(datum, types.Datum):
                raise InvalidInput(f"data[{index}] must be a Datum, got {type(datum).__name__}")
        flags = self._holder.flags
        return split_chunks(data, flags.fwdbwd_max_chunk_len, flags.fwdbwd_max_chunk_bytes_count)

    def _encode(
        self,
        chunks: list[DatumChunk],
        first_seq_id: int,
        *,
        loss_fn: str = "cross_entropy",
        config: Mapping[str, float | str] | None = None,
        forward_only: bool,
    ) -> list[EncodedChunk]:
        """Encode every chunk; rejects invalid input before anything is sent."""
        encoded = []
        for seq_id, chunk in enumerate(chunks, start=first_seq_id):
            message = types.ForwardBackwardRequest(
                forward_backward_input=types.ForwardBackwardInput(
                    data=chunk.data,
                    loss_fn=cast("types.LossFnType", loss_fn),
                    loss_fn_config=None if config is None else dict(config),
                ),
                model_id=self._model_id,
                seq_id=seq_id,
            )
            body = encode_forward_backward_request(message, forward_only)
            encoded.append(EncodedChunk(message, body, chunk.num_bytes, forward_only))
        return encoded

    async def _send(self, chunks: list[EncodedChunk]) -> list[PassJob]:
        """Send chunks in order, or concurrently if the server reorders them itself."""
        if len(chunks) > 1 and self._holder.server.accepts_unordered_chunks:
            return await gather_or_cancel(self._send_chunk(chunk) for chunk in chunks)
        return [await self._send_chunk(chunk) for chunk in chunks]

    async def _send_chunk(self, chunk: EncodedChunk) -> PassJob:
        server = self._holder.server
        async with self._holder.dispatch_budget.reserve(chunk.num_bytes):
            if server.accepts_protobuf is False:
                return await self._submit_json(chunk)
            try:
                job = await self._submit_protobuf(chunk)
            except APIStatusError as error:
                if server.accepts_protobuf or error.status not in PROTOBUF_REJECTED_STATUSES:
                    raise
                # This server has never accepted protobuf: it may be an older one.
                job = await self._resend_as_json(chunk, error)
                server.accepts_protobuf = False
                return job
        server.accepts_protobuf = True
        return job

    async def _resend_as_json(self, chunk: EncodedChunk, error: APIStatusError) -> PassJob:
        """Submit as JSON; if the server rejects that too, raise its first, more specific error."""
        try:
            return await self._submit_json(chunk)
        except APIStatusError as json_error:
            raise (error if json_error.is_user_error else json_error) from json_error

    async def _submit_json(self, chunk: EncodedChunk) -> PassJob:
        endpoint, message = chunk.json_request()
        transport, kind = self._holder.transport, chunk.request_type
        return await submit_job(transport, endpoint, message, request_type=kind)

    async def _submit_protobuf(self, chunk: EncodedChunk) -> PassJob:
        headers = {"content-type": PROTO_TYPE}
        body = chunk.body
        if self._holder.flags.proto_compress_fwdbwd and len(body) >= MIN_COMPRESS_BYTES:
            body = await asyncio.to_thread(compress_zstd, body)
            headers["content-encoding"] = "zstd"
        transport, kind = self._holder.transport, chunk.request_type
        return await submit_job(
            transport, FORWARD_BACKWARD, body, headers=headers, request_type=kind
        )

    async def _wait_and_merge(self, jobs: list[PassJob]) -> PassOutput:
        """Wait for all chunks concurrently; the first failure cancels the other waits."""
        return merge_outputs(await gather_or_cancel(self._poller.wait(job) for job in jobs))

    async def _on_loss_thread(self, work: Callable[..., T], *args: object, **options: object) -> T:
        """Run user code on a dedicated thread; the queue allows one custom loss at a time."""
        if self._loss_thread is None:
            self._loss_thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-loss")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._loss_thread, partial(work, *args, **options))


def _split_like(chunks: list[DatumChunk], data: list[types.Datum]) -> list[DatumChunk]:
    """Split other datums at the same positions."""
    result: list[DatumChunk] = []
    start = 0
    for chunk in chunks:
        end = start + len(chunk.data)
        result.append(DatumChunk(data[start:end], chunk.num_bytes))
        start = end
    return result
