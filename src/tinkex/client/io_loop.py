"""Background threads: event loops for requests and heartbeats, a thread for user hooks, and guards.

The guards exist because the HTTP library has native threads, which survive neither fork nor exit.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tinkex.client.future import IO_THREADS, APIFuture
from tinkex.errors import ConfigError
from tinkex.logs import OncePerMinute, get_logger

T = TypeVar("T")
logger = get_logger(__name__)


class IoLoop:
    """An event loop on a daemon thread; other threads hand it work with post() and start()."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._is_wakeup_scheduled = False

    def post(self, action: Callable[..., object], *args: object) -> None:
        """Schedule action(*args) on the loop, in call order."""
        self._inbox.append((action, args))
        # One wake-up serves the whole inbox: a wake-up is a system call.
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
        coroutine: Coroutine[object, None, T],
        make_task: Callable[..., asyncio.Task[T]] | None = None,
    ) -> APIFuture[T]:
        """Run a coroutine on the loop; the returned future receives its outcome.

        `make_task`, called on the loop, lets an owner create and track the task.
        """
        future: APIFuture[T] = APIFuture()
        self.post(self._launch, coroutine, future, make_task)
        return future

    def reset_after_fork(self) -> None:
        """Drop the loop and its work: after a fork they belong to the parent."""
        self._lock = threading.Lock()
        self._loop = None
        self._inbox.clear()
        self._is_wakeup_scheduled = False
        IO_THREADS.clear()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop; starts its thread if necessary."""
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
        # Cleared first: a later post must wake the loop again.
        self._is_wakeup_scheduled = False
        assert self._loop is not None
        while self._inbox:
            action, args = self._inbox.popleft()
            self._loop.call_soon(action, *args)

    def _launch(
        self,
        coroutine: Coroutine[object, None, T],
        future: APIFuture[T],
        make_task: Callable[..., asyncio.Task[T]] | None,
    ) -> None:
        assert self._loop is not None
        if future.cancelled():
            coroutine.close()
            return
        future.follow((make_task or self._loop.create_task)(coroutine), self._loop)


async def gather_or_cancel(coroutines: Iterable[Coroutine[object, None, T]]) -> list[T]:
    """Run coroutines concurrently; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:  # a cancellation of the caller too
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


#: Runs requests and polls.
IO_LOOP = IoLoop("tinkex-io")
#: Runs heartbeats only: no request, decoding or callback may delay them.
HEARTBEAT_LOOP = IoLoop("tinkex-heartbeats")


class LoopSingleton:
    """Gives access to the request loop under its name in the official package."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop on which every request runs."""
        return IO_LOOP.get_loop()


LOOP_SINGLETON = LoopSingleton()


def _after_fork() -> None:
    IO_LOOP.reset_after_fork()
    HEARTBEAT_LOOP.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


#: Events are dropped when this many hook calls are pending.
MAX_PENDING_CALLBACKS = 10_000


class CallbackThread:
    """Calls user hooks one at a time on a separate thread; logs their exceptions."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tinkex-hooks")
        self._num_pending = 0
        self._log_throttle = OncePerMinute()

    def submit(self, callback: Callable[[], object]) -> None:
        """Queue a call."""
        if self._num_pending >= MAX_PENDING_CALLBACKS:
            if self._log_throttle.allows("full"):
                logger.warning("Event hooks are too slow; some events are dropped")
            return
        self._num_pending += 1
        try:
            self._executor.submit(self._call, callback)
        except RuntimeError as error:
            # After stop() and at interpreter exit the executor accepts no work.
            logger.debug("An event hook was not called: %s", error)

    def stop(self) -> None:
        """Run the queued calls, then accept no more; does not wait."""
        self._executor.shutdown(wait=False)

    def _call(self, callback: Callable[[], object]) -> None:
        self._num_pending -= 1
        try:
            callback()
        except Exception:
            # User code: its failure must not stop the client.
            logger.warning("An event hook raised an exception", exc_info=True)


# --- fork and exit ------------------------------------------------------------------------------
#: Minimum time between the last request and interpreter exit.
EXIT_SECONDS = 0.05


class ForkGuard:
    """Raises in a forked child, where calls would hang: the library's threads end with a fork."""

    def __init__(self) -> None:
        self._is_used = False
        self._is_orphaned = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def check(self) -> None:
        """Record that the library is used; raises in a child of a process that used it."""
        if self._is_orphaned:
            raise ConfigError(
                "This process was forked from one that has already used tinkex",
                hint="Use multiprocessing's 'spawn' start method, or fork before the first call.",
            )
        self._is_used = True

    def _after_fork(self) -> None:
        self._is_orphaned = self._is_used


class ExitGuard:
    """Delays interpreter exit until the HTTP library's threads are idle.

    A thread that has just delivered a response still needs the interpreter; if it is gone, the
    thread aborts the process.
    """

    def __init__(self) -> None:
        self._last_used = -EXIT_SECONDS
        atexit.register(self._wait)

    def record_request_end(self) -> None:
        """Record the time at which a request ended."""
        self._last_used = time.monotonic()

    def _wait(self) -> None:
        time.sleep(max(0.0, self._last_used + EXIT_SECONDS - time.monotonic()))


FORK_GUARD = ForkGuard()
EXIT_GUARD = ExitGuard()
