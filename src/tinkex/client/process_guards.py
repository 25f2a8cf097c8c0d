"""Guards for fork and exit: the HTTP library has native threads that survive neither safely."""

from __future__ import annotations

import atexit
import os
import time

from tinkex.errors import ConfigError

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
