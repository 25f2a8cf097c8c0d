"""Waiting for promises on an event loop: a bell wakes, a slow look catches what no bell told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

from tinkex.errors import StoreError
from tinkex.jobs.queue import JobQueue
from tinkex.jobs.wakeup import WakeupListener
from tinkex.logs import get_logger

LOG = get_logger(__name__)
#: How often those who wait look by themselves.
POLL_SECONDS = 1.0
#: Ids per question to the database.
MAX_IDS_PER_QUERY = 500


#: Stands for every promise; no promise is called so.
ANY_JOB = ""


class Subscription:
    """Somebody who hears of a promise."""

    __slots__ = ("_news",)

    def __init__(self, news: asyncio.Future[bool]) -> None:
        self._news = news

    async def wait(self, seconds: float) -> None:
        """Return when there is, or was, news; at the latest after so many seconds."""
        await asyncio.wait([self._news], timeout=max(seconds, 0.0))


class FutureWaiters:
    """Everybody in this process who waits for a promise."""

    def __init__(self, queue: JobQueue, listener: WakeupListener) -> None:
        self._queue = queue
        self._listener = listener
        self._by_id: dict[str, set[asyncio.Future[bool]]] = {}
        self._poll_task: asyncio.Task[None] | None = None
        self._is_closing = False

    @property
    def num_waiting(self) -> int:
        """How many promises somebody waits for."""
        return len(self._by_id) - (ANY_JOB in self._by_id)

    @property
    def num_subscribed_to_all(self) -> int:
        """How many wait for news of any promise."""
        return len(self._by_id.get(ANY_JOB, ()))

    @property
    def is_closing(self) -> bool:
        """Whether nobody is to wait any more."""
        return self._is_closing

    def start(self) -> None:
        """Begin to listen, on the running loop."""
        asyncio.get_running_loop().add_reader(self._listener.socket, self._on_wakeup)
        self._poll_task = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Stop listening and let everybody go."""
        self.release_all()
        asyncio.get_running_loop().remove_reader(self._listener.socket)
        if self._poll_task is not None:
            self._poll_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poll_task

    def release_all(self) -> None:
        """Let everybody who waits go now, and nobody wait any more: the server stops."""
        self._is_closing = True
        self._wake(list(self._by_id))

    @contextlib.contextmanager
    def subscribe(self, request_id: str = ANY_JOB) -> Iterator[Subscription]:
        """Hear of one promise, or of any, from now on: look within the block, then wait.

        Whoever looks first and listens later misses what happens between.
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

    def _on_wakeup(self) -> None:
        self._wake(self._listener.messages())

    def _wake(self, request_ids: Iterable[str]) -> None:
        for request_id in (*request_ids, ANY_JOB):
            for future in self._by_id.get(request_id, ()):
                if not future.done():
                    future.set_result(True)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            asked = [request_id for request_id in self._by_id if request_id != ANY_JOB]
            for start in range(0, len(asked), MAX_IDS_PER_QUERY):
                part = asked[start : start + MAX_IDS_PER_QUERY]
                try:
                    self._wake(await asyncio.to_thread(self._queue.list_finished, part))
                except StoreError as error:
                    LOG.warning("cannot look for finished work: %s", error)
