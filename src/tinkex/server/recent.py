"""A small memory that forgets: bounded in size, and every entry for a limited time."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class TTLCache(Generic[K, V]):
    """What was found out lately; belongs to one event loop."""

    def __init__(self, *, max_entries: int, ttl_seconds: float) -> None:
        self._max_entries = max_entries
        self.ttl_seconds = ttl_seconds
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, now: float | None = None) -> V | None:
        """What is remembered of a key, unless it is too old."""
        found = self._entries.get(key)
        if found is None:
            return None
        until, value = found
        if until <= (time.monotonic() if now is None else now):
            self._entries.pop(key, None)
            return None
        return value

    def put(self, key: K, value: V, now: float | None = None) -> None:
        """Remember something; the oldest entry makes room."""
        now = time.monotonic() if now is None else now
        self._entries.pop(key, None)
        self._entries[key] = (now + self.ttl_seconds, value)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
