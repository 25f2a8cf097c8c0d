"""Waiting for promises on an event loop: a bell wakes, a slow look catches what no bell told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

from tinkex.errors import StoreError
from tinkex.jobs.bells import Bell
from tinkex.jobs.queue import JobQueue
from tinkex.logs import get_logger

LOG = get_logger(__name__)
#: How often those who wait look by themselves.
LOOK_SECONDS = 1.0
#: Ids per question to the database.
MAX_ASKED = 500


#: Stands for every promise; no promise is called so.
ANY = ""


class Listening:
    """Somebody who hears of a promise."""

    __slots__ = ("_news",)

    def __init__(self, news: asyncio.Future[bool]) -> None:
        self._news = news

    async def wait(self, seconds: float) -> None:
        """Return when there is, or was, news; at the latest after so many seconds."""
        await asyncio.wait([self._news], timeout=max(seconds, 0.0))


class Waiters:
    """Everybody in this process who waits for a promise."""

    def __init__(self, queue: JobQueue, bell: Bell) -> None:
        self._queue = queue
        self._bell = bell
        self._by_id: dict[str, set[asyncio.Future[bool]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._is_closing = False

    @property
    def num_waiting(self) -> int:
        """How many promises somebody waits for."""
        return len(self._by_id) - (ANY in self._by_id)

    @property
    def num_listening(self) -> int:
        """How many wait for news of any promise."""
        return len(self._by_id.get(ANY, ()))

    @property
    def is_closing(self) -> bool:
        """Whether nobody is to wait any more."""
        return self._is_closing

    def open(self) -> None:
        """Begin to listen, on the running loop."""
        asyncio.get_running_loop().add_reader(self._bell.socket, self._heard)
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Stop listening and let everybody go."""
        self.release()
        asyncio.get_running_loop().remove_reader(self._bell.socket)
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    def release(self) -> None:
        """Let everybody who waits go now, and nobody wait any more: the server stops."""
        self._is_closing = True
        self._wake(list(self._by_id))

    @contextlib.contextmanager
    def listening(self, request_id: str = ANY) -> Iterator[Listening]:
        """Hear of one promise, or of any, from now on: look within the block, then wait.

        Whoever looks first and listens later misses what happens between.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._is_closing:
            future.set_result(False)
        self._by_id.setdefault(request_id, set()).add(future)
        try:
            yield Listening(future)
        finally:
            waiters = self._by_id[request_id]
            waiters.discard(future)
            if not waiters:
                del self._by_id[request_id]

    def _heard(self) -> None:
        self._wake(self._bell.words())

    def _wake(self, request_ids: Iterable[str]) -> None:
        for request_id in (*request_ids, ANY):
            for future in self._by_id.get(request_id, ()):
                if not future.done():
                    future.set_result(True)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            asked = [request_id for request_id in self._by_id if request_id != ANY]
            for start in range(0, len(asked), MAX_ASKED):
                part = asked[start : start + MAX_ASKED]
                try:
                    self._wake(await asyncio.to_thread(self._queue.finished_among, part))
                except StoreError as error:
                    LOG.warning("cannot look for finished work: %s", error)
