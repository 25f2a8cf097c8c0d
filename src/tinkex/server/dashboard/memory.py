"""What pages found out and need not find out again; several threads look at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tinkex.server.dashboard.progress import RunHistory

K = TypeVar("K")
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """A bounded memory; what was not used for longest makes room."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """What is kept for a key."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep something."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)


@dataclass(frozen=True, slots=True)
class PageCache:
    """What one API process keeps for its pages; nothing is lost with it."""

    histories: LRUCache[str, RunHistory] = field(default_factory=lambda: LRUCache(32))
    """By run, for the pages of single runs: reading thousands of steps takes long."""
