"""The future every operation returns: block on it, await it, or give it callbacks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from tinkex.errors import ClientClosed, WrongThread

#: Threads on which nothing may block; each loop adds its own.
IO_THREADS: set[int] = set()

T = TypeVar("T")
U = TypeVar("U")


class APIFuture(concurrent.futures.Future[T]):
    """A result that arrives later: result() blocks, await works on any event loop.

    Resolves exactly once. Cancelling it never blocks the client: work that is not sent yet is
    dropped, work that is sent is no longer waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seq_id: int | None = None
        """The number of a training operation among those of its run; None for other futures."""
        self._on_cancel: Callable[[], Any] | None = None
        self._cancel_count = itertools.count()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value; refused on an I/O thread, which would wait for itself."""
        if not self.done() and threading.get_ident() in IO_THREADS:
            raise WrongThread
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error, or None; refused on an I/O thread like result()."""
        if not self.done() and threading.get_ident() in IO_THREADS:
            raise WrongThread
        return super().exception(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """Wait without blocking the event loop; a timeout leaves the operation running."""
        waiter = asyncio.wrap_future(self)
        if timeout is None:
            return await waiter
        # Shielded: running out of time is the caller's business, not the operation's. Its error,
        # if it comes later, has been looked at as far as asyncio is concerned.
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.wait_for(asyncio.shield(waiter), timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def coroutine(self) -> Coroutine[Any, Any, T]:
        """A new coroutine for asyncio.create_task or gather; each call returns another one."""
        return self.result_async()

    def future(self) -> concurrent.futures.Future[T]:
        """This future itself: it already is one from concurrent.futures."""
        return self

    def cancel(self) -> bool:
        """Give up on the result; True unless it is there already."""
        if not super().cancel():
            return False
        # Once, or concurrent.futures.wait() and as_completed() never hear of it.
        if next(self._cancel_count) == 0:
            self.set_running_or_notify_cancel()
        stop = self._on_cancel
        if stop is not None:
            stop()
        return True

    def settle(self, value: T) -> None:
        """Resolve with a value, unless it is resolved or cancelled already."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Resolve with an error, unless it is resolved or cancelled already."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.set_exception(error)

    def stop_with(self, stop: Callable[[], Any] | None) -> None:
        """Say what cancelling this future shall do from now on."""
        self._on_cancel = stop
        if stop is not None and self.cancelled():
            stop()

    def follow(self, task: asyncio.Task[T], loop: asyncio.AbstractEventLoop) -> None:
        """Take over a task's outcome; cancelling this future cancels the task."""
        task.add_done_callback(self._copy_outcome)
        self.stop_with(lambda: loop.call_soon_threadsafe(task.cancel))

    def _copy_outcome(self, task: asyncio.Task[T]) -> None:
        self._on_cancel = None
        if task.cancelled():
            if not self.cancelled():
                self.fail(ClientClosed("The operation was stopped because its client was closed"))
        elif (error := task.exception()) is not None:
            self.fail(error)
        else:
            self.settle(task.result())


def map_future(source: APIFuture[T], transform: Callable[[T], U]) -> APIFuture[U]:
    """A future with the changed value of another; cancelling it cancels the other."""
    target: APIFuture[U] = APIFuture()

    def pass_on(done: concurrent.futures.Future[T]) -> None:
        # Nothing to stop any more: a result must not keep what it was made of.
        target.stop_with(None)
        if done.cancelled():
            target.cancel()
        elif (error := done.exception()) is not None:
            target.fail(error)
        else:
            _settle_mapped(target, transform, done.result())

    target.stop_with(source.cancel)
    source.add_done_callback(pass_on)
    return target


def _settle_mapped(target: APIFuture[U], transform: Callable[[T], U], value: T) -> None:
    try:
        target.settle(transform(value))
    except Exception as error:  # noqa: BLE001 - the caller must see it, whatever it is
        target.fail(error)
