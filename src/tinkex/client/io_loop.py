"""The background threads on which all I/O happens, away from the user's code."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tinkex.client.future import IO_THREADS, APIFuture
from tinkex.logs import OncePerMinute, get_logger

T = TypeVar("T")
logger = get_logger(__name__)


class IoLoop:
    """An event loop on a daemon thread; work comes in through post() and start()."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_wakeup_scheduled = False

    def post(self, action: Callable[..., Any], *args: Any) -> None:
        """Run action(*args) on the loop, soon and in the order of the calls."""
        self._inbox.append((action, args))
        # One wake-up serves everything that is in the inbox: a wake-up is a system call.
        if not self._is_wakeup_scheduled:
            self._is_wakeup_scheduled = True
            try:
                self.get_loop().call_soon_threadsafe(self._drain)
            except BaseException:
                # Interrupted in between: the next post must try again.
                self._is_wakeup_scheduled = False
                raise

    def start(
        self,
        coroutine: Coroutine[Any, Any, T],
        make_task: Callable[..., asyncio.Task[T]] | None = None,
    ) -> APIFuture[T]:
        """Run a coroutine on the loop; its outcome arrives in the returned future.

        `make_task` is for an owner that wants to know the task; it is called on the loop.
        """
        future: APIFuture[T] = APIFuture()
        self.post(self._launch, coroutine, future, make_task)
        return future

    def reset_after_fork(self) -> None:
        """Drop the thread and its work: after a fork they belong to the parent."""
        self._lock = threading.Lock()
        self._loop = None
        self._inbox.clear()
        self._is_wakeup_scheduled = False
        IO_THREADS.clear()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop itself, started if it is not running."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            return self._loop

    def _run(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        IO_THREADS.add(threading.get_ident())
        self._loop.run_forever()

    def _drain(self) -> None:
        # Cleared first: what is posted from now on wakes the loop again.
        self._is_wakeup_scheduled = False
        assert self._loop is not None
        while self._inbox:
            action, args = self._inbox.popleft()
            self._loop.call_soon(action, *args)

    def _launch(
        self,
        coroutine: Coroutine[Any, Any, T],
        future: APIFuture[T],
        make_task: Callable[..., asyncio.Task[T]] | None,
    ) -> None:
        assert self._loop is not None
        if future.cancelled():
            coroutine.close()
            return
        future.follow((make_task or self._loop.create_task)(coroutine), self._loop)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run works side by side; the first failure stops the others and is raised as it is."""
    tasks = [asyncio.ensure_future(work) for work in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


#: Requests and polls.
IO_LOOP = IoLoop("tinkex-io")
#: Heartbeats, alone: no request, decoding or callback may delay them.
HEARTBEAT_LOOP = IoLoop("tinkex-pulse")


class LoopSingleton:
    """The event loop of all requests, under the name that debugging tools know."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which every request runs."""
        return IO_LOOP.get_loop()


LOOP_SINGLETON = LoopSingleton()


def _after_fork() -> None:
    IO_LOOP.reset_after_fork()
    HEARTBEAT_LOOP.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


#: More than this many calls behind, a hook is too slow to be told of everything.
MAX_PENDING_CALLBACKS = 10_000


class CallbackThread:
    """Calls hooks one after the other; what they raise is logged."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tinkex-hooks")
        self._num_pending = 0
        self._log_throttle = OncePerMinute()

    def submit(self, callback: Callable[[], Any]) -> None:
        """Call it soon, after what came before it."""
        if self._num_pending >= MAX_PENDING_CALLBACKS:
            if self._log_throttle.allows("full"):
                logger.warning("Hooks are slower than what they are told of; some are not called")
            return
        self._num_pending += 1
        try:
            self._executor.submit(self._call, callback)
        except RuntimeError as error:
            # After stop() and at interpreter exit nobody listens any more; work goes on.
            logger.debug("A hook was not called: %s", error)

    def stop(self) -> None:
        """Call what is waiting, then nothing more; returns at once."""
        self._executor.shutdown(wait=False)

    def _call(self, callback: Callable[[], Any]) -> None:
        self._num_pending -= 1
        try:
            callback()
        except Exception:
            logger.warning("A hook raised", exc_info=True)
