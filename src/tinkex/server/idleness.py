"""How long nobody has asked a server for anything."""

from __future__ import annotations


class Idleness:
    """Watches the time that the activity file bears, by a clock that stops while a laptop sleeps.

    The file's own age would say that a machine which slept for an hour was idle for an hour, and
    the server of a client that sleeps with it would stop.
    """

    def __init__(self, now: float) -> None:
        self._touched: float | None = None
        self._since = now

    def seconds(self, touched: float | None, now: float) -> float:
        """How long the file has borne the same time; None is a file that is gone."""
        if touched != self._touched:
            self._touched = touched
            self._since = now
        return now - self._since
