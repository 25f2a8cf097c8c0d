"""APIFuture: the future that every operation returns; can be blocked on or awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from tinkex.errors import ClientClosed, WrongThread

#: Ids of the I/O threads, on which blocking would deadlock.
IO_THREADS: set[int] = set()

T = TypeVar("T")
U = TypeVar("U")


class APIFuture(concurrent.futures.Future[T]):
    """A future whose result() blocks and which can be awaited on any event loop.

    It resolves exactly once. Cancelling it drops work that is not sent yet, and stops waiting for
    work that is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seq_id: int | None = None
        """The sequence number of a training operation in its run; None for other futures."""
        self._on_cancel: Callable[[], object] | None = None
        self._cancel_count = itertools.count()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value; raises WrongThread on an I/O thread, where it would deadlock."""
        if not self.done() and threading.get_ident() in IO_THREADS:
            raise WrongThread
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error, or None; raises WrongThread on an I/O thread like result()."""
        if not self.done() and threading.get_ident() in IO_THREADS:
            raise WrongThread
        return super().exception(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """Wait without blocking the event loop; a timeout leaves the operation running."""
        waiter = asyncio.wrap_future(self)
        if timeout is None:
            return await waiter
        # Shielded: a timeout must not cancel the operation. The callback retrieves a later error,
        # so that asyncio does not report it as never retrieved.
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.wait_for(asyncio.shield(waiter), timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def coroutine(self) -> Coroutine[Any, Any, T]:
        """Return a new coroutine, for asyncio.create_task or gather."""
        return self.result_async()

    def future(self) -> concurrent.futures.Future[T]:
        """Return this future itself, which is a concurrent.futures.Future."""
        return self

    def cancel(self) -> bool:
        """Cancel the operation; False if it is already resolved."""
        if not super().cancel():
            return False
        # Exactly once: notifies concurrent.futures.wait() and as_completed().
        if next(self._cancel_count) == 0:
            self.set_running_or_notify_cancel()
        stop = self._on_cancel
        if stop is not None:
            stop()
        return True

    def settle(self, value: T) -> None:
        """Resolve with a value, unless already resolved or cancelled."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Resolve with an error, unless already resolved or cancelled."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.set_exception(error)

    def stop_with(self, stop: Callable[[], object] | None) -> None:
        """Set the function that cancelling this future calls."""
        self._on_cancel = stop
        if stop is not None and self.cancelled():
            stop()

    def follow(self, task: asyncio.Task[T], loop: asyncio.AbstractEventLoop) -> None:
        """Copy a task's outcome to this future; cancelling this future cancels the task."""
        task.add_done_callback(self._copy_outcome)
        self.stop_with(lambda: loop.call_soon_threadsafe(task.cancel))

    def _copy_outcome(self, task: asyncio.Task[T]) -> None:
        self._on_cancel = None
        if task.cancelled():
            if not self.cancelled():
                self.fail(ClientClosed("The operation was cancelled because its client was closed"))
        elif (error := task.exception()) is not None:
            self.fail(error)
        else:
            self.settle(task.result())


def map_future(
    source: APIFuture[T], transform: Callable[[T], U], target: APIFuture[U] | None = None
) -> APIFuture[U]:
    """Return a future with the transformed value of another; cancelling it cancels the other."""
    target = APIFuture() if target is None else target

    def copy_outcome(done: concurrent.futures.Future[T]) -> None:
        # Drop the reference: a result must not keep its source alive.
        target.stop_with(None)
        if done.cancelled():
            target.cancel()
        elif (error := done.exception()) is not None:
            target.fail(error)
        else:
            _settle_mapped(target, transform, done.result())

    target.stop_with(source.cancel)
    source.add_done_callback(copy_outcome)
    return target


def _settle_mapped(target: APIFuture[U], transform: Callable[[T], U], value: T) -> None:
    try:
        target.settle(transform(value))
    except Exception as error:  # noqa: BLE001 - any failure of the transform goes to the future
        target.fail(error)
