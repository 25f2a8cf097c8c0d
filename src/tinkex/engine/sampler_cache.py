"""LRU cache of weights that were loaded from checkpoint directories for sampling."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from tinkex.engine.checkpoints.metadata import WEIGHTS_NAME
from tinkex.errors import InvalidInput

Value = TypeVar("Value")
CacheKey: TypeAlias = tuple[Path, int, int] | str
"""The key of the source, or directory, inode and modification time of the weights."""


class SamplerCache(Generic[Value]):
    """Keeps the most recently used values, up to a total size in any unit the caller chooses.

    The value used last stays in the cache even if it exceeds the limit on its own.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self.size = 0
        """The total size of all cached values."""
        self._entries: OrderedDict[CacheKey, tuple[Value, int]] = OrderedDict()

    def get_or_load(
        self, directory: Path, load: Callable[[CacheKey], tuple[Value, int]], key: CacheKey = ""
    ) -> Value:
        """Return the value of a checkpoint; `load` returns a new value and its size.

        Raises InvalidInput if there is no key and the directory has no saved weights.
        """
        key = key or _cache_key(directory)
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][0]
        value, size = load(key)
        self._entries[key] = value, size
        self.size += size
        while self.size > self._max_size and len(self._entries) > 1:
            _, (_, freed) = self._entries.popitem(last=False)
            self.size -= freed
        return value

    def clear(self) -> None:
        """Drop all cached values."""
        self._entries.clear()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)


def _cache_key(directory: Path) -> CacheKey:
    # The path is not enough: the directory may have been replaced by another of the same name.
    try:
        status = (directory / WEIGHTS_NAME).stat()
    except OSError:
        raise InvalidInput(f"there are no saved weights in {directory.name!r}") from None
    return directory, status.st_ino, status.st_mtime_ns
