"""Measures token streams; the server's implementation exports Prometheus metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import monotonic


class StreamObservation:
    """The times of one stream."""

    def __init__(self, on_first: Callable[[float], None], on_next: Callable[[float], None]) -> None:
        self._on_first = on_first
        self._on_next = on_next
        self._is_first = True
        self._last_at = monotonic()

    def count_tokens(self) -> None:
        """Tokens have arrived."""
        now = monotonic()
        (self._on_first if self._is_first else self._on_next)(now - self._last_at)
        self._is_first, self._last_at = False, now


class StreamObserver:
    """Ignores all measurements."""

    @contextlib.contextmanager
    def observe_stream(self) -> Iterator[StreamObservation]:
        """Measure a stream while it is open."""
        self.count_open(1)
        try:
            yield StreamObservation(self.observe_first_token, self.observe_next_token)
        finally:
            self.count_open(-1)

    def count_open(self, change: int) -> None:
        """Streams were opened or closed."""

    def count_connections(self, change: int) -> None:
        """Connections to workers were opened or closed."""

    def count_unstreamed(self) -> None:
        """All tokens of a stream came from the stored result."""

    def count_cancelled(self) -> None:
        """A job was cancelled because its client has disconnected."""

    def observe_first_token(self, seconds: float) -> None:
        """The time from the begin of a stream to its first token."""

    def observe_next_token(self, seconds: float) -> None:
        """The time between two arrivals of tokens."""
