"""Per-model send queue: requests are sent in call order, results may arrive in any order.

Seq ids and queue positions are assigned in the caller's thread, so call order is send order even
if no future is awaited. A cancelled or failed operation does not block the queue.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Generic, TypeVar

from tinkex.client.future import APIFuture
from tinkex.client.holder import Holder
from tinkex.client.io_loop import IO_LOOP
from tinkex.client.metrics import Timing
from tinkex.errors import ClientClosed

T = TypeVar("T")
SentT = TypeVar("SentT")

#: create_model has seq id 0.
FIRST_SEQ_ID = 1


@dataclass(slots=True)
class QueuedOperation(Generic[SentT, T]):
    """One call: `send` blocks the queue, `receive` does not."""

    name: str
    num_requests: int
    send: Callable[[], Coroutine[object, None, SentT]]
    receive: Callable[[SentT], Coroutine[object, None, T]]
    future: APIFuture[T]
    called_at: float
    submit_seconds: float = 0.0


class OrderedQueue:
    """Sends the operations of one model, one at a time and in order."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._lock = threading.RLock()
        self._next_seq_id = FIRST_SEQ_ID
        self._waiting: deque[QueuedOperation[object, object]] = deque()
        self._send_task: asyncio.Task[None] | None = None

    def submit(
        self,
        name: str,
        num_requests: int,
        prepare: Callable[[int], Callable[[], Coroutine[object, None, SentT]]],
        receive: Callable[[SentT], Coroutine[object, None, T]],
    ) -> APIFuture[T]:
        """Reserve seq ids and a queue position; `prepare(first_seq_id)` encodes and returns `send`.

        If prepare raises, no id is used and nothing is sent.
        """
        self._holder.check_usable()
        future: APIFuture[T] = APIFuture()
        # Re-entrant: a signal handler that saves a checkpoint may interrupt `prepare`.
        with self._lock:
            called_at = time.monotonic()
            first_seq_id = self._next_seq_id
            self._next_seq_id += num_requests
            try:
                send = prepare(first_seq_id)
            except BaseException:  # KeyboardInterrupt too: a skipped seq id would block the queue
                if self._next_seq_id == first_seq_id + num_requests:
                    self._next_seq_id = first_seq_id
                raise
            future.seq_id = first_seq_id
            operation = QueuedOperation(name, num_requests, send, receive, future, called_at)
            IO_LOOP.post(self._enqueue, operation)
        return future

    def _enqueue(self, operation: QueuedOperation[object, object]) -> None:
        self._waiting.append(operation)
        if self._send_task is None or self._send_task.done():
            self._send_task = asyncio.get_running_loop().create_task(self._send_loop())

    async def _send_loop(self) -> None:
        while self._waiting:
            operation = self._waiting.popleft()
            if self._holder.is_closed:
                operation.future.fail(ClientClosed("This client is closed; nothing was sent"))
            elif not operation.future.cancelled():
                await self._send(operation)

    async def _send(self, operation: QueuedOperation[object, object]) -> None:
        """Send one operation; a failure or cancellation ends only this operation."""
        loop = asyncio.get_running_loop()
        sending = self._holder.create_task(operation.send())
        operation.future.stop_with(lambda: loop.call_soon_threadsafe(sending.cancel))
        await asyncio.wait([sending])
        operation.submit_seconds = time.monotonic() - operation.called_at
        if sending.cancelled():
            operation.future.fail(ClientClosed("The operation was cancelled before it was sent"))
        elif (error := sending.exception()) is not None:
            operation.future.fail(error)
        else:
            receiving = self._holder.create_task(operation.receive(sending.result()))
            operation.future.follow(receiving, loop)
        operation.future.add_done_callback(_timing_callback(weakref.ref(self._holder), operation))


def _timing_callback(
    holder_ref: weakref.ref[Holder], operation: QueuedOperation[object, object]
) -> Callable[[concurrent.futures.Future[object]], None]:
    """Record the duration of an operation; holds no reference to its data or to the holder."""
    name, num_requests = operation.name, operation.num_requests
    called_at, submit_seconds = operation.called_at, operation.submit_seconds

    def report(future: concurrent.futures.Future[object]) -> None:
        holder = holder_ref()
        if holder is None:
            return
        holder.record_timing(
            Timing(
                operation=name,
                seconds=time.monotonic() - called_at,
                submit_seconds=submit_seconds,
                num_requests=num_requests,
                ok=not future.cancelled() and future.exception() is None,
            )
        )

    return report
