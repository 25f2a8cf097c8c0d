"""One model on the server: operations are encoded when called, sent in order, merged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tinkex import types
from tinkex.client.chunking import Chunk, split
from tinkex.client.custom_loss import Surrogate, differentiate, forward_data, with_custom_metrics
from tinkex.client.dispatch import Batch, BatchSender
from tinkex.client.future import APIFuture
from tinkex.client.holder import Holder
from tinkex.client.jobs import Promise, submit, wait
from tinkex.client.loop import together
from tinkex.client.merging import merge
from tinkex.client.queue_state import QueueStateLogger
from tinkex.client.road import Road
from tinkex.client.transport import outgoing
from tinkex.errors import InvalidInput
from tinkex.ids import check_name
from tinkex.lifetimes import check_ttl
from tinkex.wire.endpoints import Endpoint

T = TypeVar("T")
Output = types.ForwardBackwardOutput


class Adapter:
    """The order of operations of one model, and how each travels."""

    def __init__(self, holder: Holder, model_id: str) -> None:
        self._holder = holder
        self._poller = holder.poller(QueueStateLogger("training", model_id), model_id)
        self._road = Road(holder)
        self._sender = BatchSender(holder, model_id)
        self._loss_thread: ThreadPoolExecutor | None = None

    def run(
        self, endpoint: Endpoint[Any, Any], message_for: Callable[[int], object]
    ) -> APIFuture[Any]:
        """An operation of one request; `message_for(seq_id)` makes its message."""
        transport = self._holder.transport

        def prepare(seq_id: int) -> Callable[[], Awaitable[Promise]]:
            request = outgoing(endpoint, message_for(seq_id))
            return lambda: submit(transport, request)

        def receive(promise: Promise) -> Awaitable[Any]:
            return wait(self._poller, promise)

        return self._road.enter(endpoint.name, 1, prepare, receive)

    def run_pass(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> APIFuture[Output]:
        """A forward or forward_backward over any number of datums."""
        # A copy: the caller may reuse its list as soon as this returns.
        batch = Batch(self._cut(list(data)), loss_fn, config, forward_only)

        def prepare(first: int) -> Callable[[], Awaitable[list[Promise]]]:
            requests = self._sender.encode(batch, first)
            return lambda: self._sender.send(requests)

        name = "forward" if forward_only else "forward_backward"
        return self._road.enter(name, len(batch.chunks), prepare, self._gather)

    def run_custom(self, data: Sequence[types.Datum], loss_fn: Any) -> APIFuture[Output]:
        """A forward, the user's loss on a thread of its own, then its gradient as a backward.

        All three hold the road, so a later optim_step cannot pass the backward. Its ids are
        reserved with the forward's: both are cut alike.
        """
        data = list(data)
        chunks = self._cut(forward_data(data))
        count = len(chunks)

        def prepare(first: int) -> Callable[[], Awaitable[tuple[list[Promise], Surrogate]]]:
            forward = Batch(chunks, "cross_entropy", None, forward_only=True)
            requests = self._sender.encode(forward, first)

            async def send() -> tuple[list[Promise], Surrogate]:
                outputs = (await self._gather(await self._sender.send(requests))).loss_fn_outputs
                surrogate = await self._on_loss_thread(differentiate, data, outputs, loss_fn)
                again = _recut(chunks, surrogate.data)
                backward = Batch(again, "cross_entropy", None, forward_only=False)
                encoded = await self._on_loss_thread(self._sender.encode, backward, first + count)
                return await self._sender.send(encoded), surrogate

            return send

        async def receive(sent: tuple[list[Promise], Surrogate]) -> Output:
            return with_custom_metrics(await self._gather(sent[0]), sent[1])

        return self._road.enter("forward_backward_custom", 2 * count, prepare, receive)

    async def _on_loss_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run user code on a thread that serves nothing else; the road allows one at a time."""
        if self._loss_thread is None:
            self._loss_thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-loss")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._loss_thread, partial(work, *args))

    def _cut(self, data: list[types.Datum]) -> list[Chunk]:
        for index, datum in enumerate(data):
            if not isinstance(datum, types.Datum):
                raise InvalidInput(f"data[{index}] is no Datum: {type(datum).__name__}")
        flags = self._holder.flags
        return split(data, flags.fwdbwd_max_chunk_len, flags.fwdbwd_max_chunk_bytes_count)

    async def _gather(self, promises: list[Promise]) -> Output:
        """Wait for all chunks at once; the first failure stops the waiting for the rest."""
        return merge(await together(wait(self._poller, promise) for promise in promises))


def _recut(chunks: list[Chunk], data: list[types.Datum]) -> list[Chunk]:
    """The same cut applied to other datums."""
    cut: list[Chunk] = []
    start = 0
    for chunk in chunks:
        end = start + len(chunk.data)
        cut.append(Chunk(data[start:end], chunk.num_bytes))
        start = end
    return cut


def check_saving(name: str, ttl_seconds: int | None) -> None:
    """Refuse a checkpoint's name or lifetime before anything is sent."""
    check_name(name)
    check_ttl(ttl_seconds)
