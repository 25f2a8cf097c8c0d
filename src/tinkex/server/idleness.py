"""How long nobody has asked a server for anything."""

from __future__ import annotations


class IdleTimer:
    """Watches the time that the activity file bears, by a clock that stops while a laptop sleeps.

    The file's own age would say that a machine which slept for an hour was idle for an hour, and
    the server of a client that sleeps with it would stop.
    """

    def __init__(self, now: float) -> None:
        self._activity_time: float | None = None
        self._since = now

    def idle_seconds(self, activity_time: float | None, now: float) -> float:
        """How long the file has borne the same time; None is a file that is gone."""
        if activity_time != self._activity_time:
            self._activity_time = activity_time
            self._since = now
        return now - self._since
