"""Index of cached prompts by prefix: finds the one with the longest common prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
Value = TypeVar("Value")

#: The prefix length of a bucket; shorter common prefixes are not worth a copy.
MIN_PREFIX_TOKENS = 16
#: Maximum number of prompts, in total and per bucket.
_MAX_PROMPTS = 1024
_MAX_PER_BUCKET = 64


class PrefixMatch(NamedTuple, Generic[Value]):
    """The value of the prompt with the longest common prefix, and the prefix length."""

    value: Value
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _PrefixEntry(Generic[Value]):
    bucket: Hashable
    tokens: Tokens
    value: Value


class PrefixIndex(Generic[Value]):
    """Prompts by key, least recently used first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _PrefixEntry[Value]] = OrderedDict()
        self._buckets: dict[Hashable, dict[int, None]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Value]:
        return (entry.value for entry in self._entries.values())

    def find(self, key: Hashable, tokens: Tokens) -> PrefixMatch[Value] | None:
        """Find the prompt with the longest common prefix."""
        best_length, best_id = 0, -1
        for entry_id in self._buckets.get(_bucket_key(key, tokens), ()):
            length = common_prefix_length(self._entries[entry_id].tokens, tokens)
            if length > best_length:
                best_length, best_id = length, entry_id
        if best_length < MIN_PREFIX_TOKENS:
            return None
        self._entries.move_to_end(best_id)
        return PrefixMatch(self._entries[best_id].value, best_length)

    def add(self, key: Hashable, tokens: Tokens, value: Value) -> list[Value]:
        """Add a prompt; returns the values of entries that it replaces or evicts."""
        if len(tokens) < MIN_PREFIX_TOKENS:
            return [value]
        bucket = _bucket_key(key, tokens)
        similar = self._buckets.setdefault(bucket, {})
        # A prompt replaces all prompts that are prefixes of it.
        old_ids = [i for i in similar if _starts_with(tokens, self._entries[i].tokens)]
        if len(similar) - len(old_ids) >= _MAX_PER_BUCKET:
            old_ids.append(next(i for i in self._entries if i in similar and i not in old_ids))
        elif len(self._entries) - len(old_ids) >= _MAX_PROMPTS:
            old_ids.append(next(i for i in self._entries if i not in old_ids))
        removed = [self._remove(entry_id) for entry_id in old_ids]
        self._entries[self._next_id] = _PrefixEntry(bucket, tokens, value)
        self._buckets.setdefault(bucket, {})[self._next_id] = None
        self._next_id += 1
        return removed

    def evict_oldest(self, is_free: Callable[[Value], bool]) -> Value | None:
        """Remove the least recently used prompt among those that are free."""
        for entry_id, entry in self._entries.items():
            if is_free(entry.value):
                return self._remove(entry_id)
        return None

    def clear(self) -> list[Value]:
        """Remove all prompts and return their values."""
        values = list(self)
        self._entries.clear()
        self._buckets.clear()
        return values

    def _remove(self, entry_id: int) -> Value:
        entry = self._entries.pop(entry_id)
        similar = self._buckets[entry.bucket]
        del similar[entry_id]
        if not similar:
            del self._buckets[entry.bucket]
        return entry.value


def common_prefix_length(one: Tokens, other: Tokens) -> int:
    """The length of the common prefix."""
    num = min(len(one), len(other))
    differs = one[:num] != other[:num]
    first = int(differs.argmax()) if num else 0
    return first if num and differs[first] else num


def _starts_with(tokens: Tokens, prefix: Tokens) -> bool:
    return len(prefix) <= len(tokens) and common_prefix_length(tokens, prefix) == len(prefix)


def _bucket_key(key: Hashable, tokens: Tokens) -> Hashable:
    return key, tokens[:MIN_PREFIX_TOKENS].tobytes()
