"""A sign of life: a byte every second through a pipe, written by the loop that must not block.

The supervisor counts by the monotonic clock, from the first beat on: how long a process takes to
start is not its concern, and a machine that slept has not missed a beat.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

HEARTBEAT_INTERVAL_SECONDS = 1.0
_READ_BYTES = 4096


def start_heartbeat(descriptor: int) -> None:
    """Write a byte every second from now on, as far as the running loop gets to it."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)

    def beat() -> None:
        # A pipe that is full, or has no reader, is the supervisor's concern.
        with contextlib.suppress(OSError):
            os.write(descriptor, b".")
        loop.call_later(HEARTBEAT_INTERVAL_SECONDS, beat)

    beat()


class HeartbeatMonitor:
    """The supervisor's end of the pipe."""

    def __init__(
        self, max_silence_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_silence_seconds = max_silence_seconds
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self._clock = clock
        self._beat_at: float | None = None
        self._checked_at = clock()

    @property
    def poll_seconds(self) -> float:
        """How often to look."""
        return min(self.max_silence_seconds / 4, 5.0)

    def has_stopped(self) -> bool:
        """Whether the process has beaten before, and not for too long since; look often."""
        now = self._clock()
        # If we ourselves were stopped meanwhile, so was the other process, perhaps.
        was_away = now - self._checked_at > self.max_silence_seconds / 2
        self._checked_at = now
        if self._has_received_beat() or (was_away and self._beat_at is not None):
            self._beat_at = now
        return self._beat_at is not None and now - self._beat_at > self.max_silence_seconds

    def _has_received_beat(self) -> bool:
        try:
            return bool(os.read(self.read_fd, _READ_BYTES))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the end that reads; the one that writes is the child's."""
        os.close(self.read_fd)
