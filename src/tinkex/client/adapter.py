"""One model on the server: operations are encoded when called, sent in order, merged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tinkex import types
from tinkex.client.chunking import DatumChunk, split_chunks
from tinkex.client.custom_loss import (
    SurrogateLoss,
    compute_surrogate,
    forward_data,
    with_custom_metrics,
)
from tinkex.client.dispatch import PassRequest, PassSender
from tinkex.client.future import APIFuture
from tinkex.client.holder import Holder
from tinkex.client.jobs import SubmittedJob, submit_job, wait_for_result
from tinkex.client.loop import gather_or_cancel
from tinkex.client.merging import merge_outputs
from tinkex.client.queue_state import QueueStateLogger
from tinkex.client.road import OrderedQueue
from tinkex.client.transport import build_request
from tinkex.errors import InvalidInput
from tinkex.ids import check_name
from tinkex.lifetimes import check_ttl
from tinkex.wire.endpoints import Endpoint

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
