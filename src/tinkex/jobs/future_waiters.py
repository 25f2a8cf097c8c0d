"""Wait for jobs on an event loop: woken by notifications, with polling as a fallback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

from tinkex.errors import StoreError
from tinkex.jobs.queue import JobQueue
from tinkex.jobs.wakeup import WakeupListener
from tinkex.logs import get_logger

LOG = get_logger(__name__)
#: Interval of the fallback poll.
POLL_SECONDS = 1.0
#: Ids per database query.
MAX_IDS_PER_QUERY = 500
#: Subscribes to all jobs; no job has this id.
ANY_JOB = ""


class Subscription:
    """A waiter for the end of one job, or of any job."""

    __slots__ = ("_event",)

    def __init__(self, event: asyncio.Future[bool]) -> None:
        self._event = event

    async def wait(self, seconds: float) -> None:
        """Return when the job has finished since the subscription, or after the timeout."""
        await asyncio.wait([self._event], timeout=max(seconds, 0.0))


class FutureWaiters:
    """All waiters of this process."""

    def __init__(self, queue: JobQueue, listener: WakeupListener) -> None:
        self._queue = queue
        self._listener = listener
        self._by_id: dict[str, set[asyncio.Future[bool]]] = {}
        self._listeners: dict[str, set[Callable[[], None]]] = {}
        self._poll_task: asyncio.Task[None] | None = None
        self._is_closing = False

    @property
    def num_waiting(self) -> int:
        """The number of jobs with waiters."""
        return len((self._by_id.keys() | self._listeners.keys()) - {ANY_JOB})

    @property
    def num_subscribed_to_all(self) -> int:
        """The number of waiters for any job."""
        return len(self._by_id.get(ANY_JOB, ()))

    @property
    def is_closing(self) -> bool:
        """Whether the server stops, so that requests must not wait."""
        return self._is_closing

    def start(self) -> None:
        """Start listening and polling on the running loop."""
        asyncio.get_running_loop().add_reader(self._listener.socket, self._on_wakeup)
        self._poll_task = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Release all waiters and stop listening."""
        self.release_all()
        asyncio.get_running_loop().remove_reader(self._listener.socket)
        if self._poll_task is not None:
            self._poll_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poll_task

    def release_all(self) -> None:
        """Release all waiters now, and every later one at once, because the server stops."""
        self._is_closing = True
        self._wake([*self._by_id, *self._listeners])

    @contextlib.contextmanager
    def subscribe(self, request_id: str = ANY_JOB) -> Iterator[Subscription]:
        """Subscribe to one job or to all.

        Check the job's state inside the block, then wait: a check before the block would miss what
        happens in between.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._is_closing:
            future.set_result(False)
        self._by_id.setdefault(request_id, set()).add(future)
        try:
            yield Subscription(future)
        finally:
            waiters = self._by_id[request_id]
            waiters.discard(future)
            if not waiters:
                del self._by_id[request_id]

    @contextlib.contextmanager
    def listen(self, request_id: str, callback: Callable[[], None]) -> Iterator[None]:
        """Call a function, until the block ends, whenever a job may have finished."""
        self._listeners.setdefault(request_id, set()).add(callback)
        try:
            yield
        finally:
            listeners = self._listeners[request_id]
            listeners.discard(callback)
            if not listeners:
                del self._listeners[request_id]

    def _on_wakeup(self) -> None:
        self._wake(self._listener.messages())

    def _wake(self, request_ids: Iterable[str]) -> None:
        for request_id in (*request_ids, ANY_JOB):
            for future in self._by_id.get(request_id, ()):
                if not future.done():
                    future.set_result(True)
            for callback in self._listeners.get(request_id, ()):
                callback()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            request_ids = list((self._by_id.keys() | self._listeners.keys()) - {ANY_JOB})
            for start in range(0, len(request_ids), MAX_IDS_PER_QUERY):
                part = request_ids[start : start + MAX_IDS_PER_QUERY]
                try:
                    self._wake(await asyncio.to_thread(self._queue.list_finished, part))
                except StoreError as error:
                    LOG.warning("cannot poll for finished jobs: %s", error)
