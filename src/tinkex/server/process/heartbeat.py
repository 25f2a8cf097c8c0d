"""Event loop heartbeats: the child writes a byte to a pipe every second, the supervisor reads it.

The monitor uses the monotonic clock and starts with the first heartbeat: startup may take any
time, and a machine that slept has not missed a heartbeat.
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
    """Write a byte every second from the running event loop."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)

    def beat() -> None:
        # The supervisor handles a full pipe; without a reader this process ends anyway.
        with contextlib.suppress(OSError):
            os.write(descriptor, b".")
        loop.call_later(HEARTBEAT_INTERVAL_SECONDS, beat)

    beat()


class HeartbeatMonitor:
    """The supervisor's end of the heartbeat pipe."""

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
        """How often to call `has_stopped`."""
        return min(self.max_silence_seconds / 4, 5.0)

    def has_stopped(self) -> bool:
        """Whether heartbeats started and then stopped; call it every `poll_seconds`."""
        now = self._clock()
        # If this process was suspended in between, the child may have been suspended too.
        was_suspended = now - self._checked_at > self.max_silence_seconds / 2
        self._checked_at = now
        if self._has_received_beat() or (was_suspended and self._beat_at is not None):
            self._beat_at = now
        return self._beat_at is not None and now - self._beat_at > self.max_silence_seconds

    def _has_received_beat(self) -> bool:
        try:
            return bool(os.read(self.read_fd, _READ_BYTES))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the read end; the child owns the write end."""
        os.close(self.read_fd)
