"""Prompts that were read before: a new one that begins the same need not be read from the start."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
Value = TypeVar("Value")

#: Prompts are told apart by so many first tokens; fewer in common are not worth a copy.
MIN_PREFIX_TOKENS = 16
#: The most prompts that are kept, and of those that begin the same.
_MAX_PROMPTS = 1024
_MAX_PER_BUCKET = 64


class PrefixMatch(NamedTuple, Generic[Value]):
    """What is kept of the prompt that has most in common, and how many tokens."""

    value: Value
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _PrefixEntry(Generic[Value]):
    bucket: Hashable
    tokens: Tokens
    value: Value


class PrefixIndex(Generic[Value]):
    """Prompts by adapter, those not used for longest first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _PrefixEntry[Value]] = OrderedDict()
        self._buckets: dict[Hashable, dict[int, None]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Value]:
        return (entry.value for entry in self._entries.values())

    def find(self, key: Hashable, tokens: Tokens) -> PrefixMatch[Value] | None:
        """The prompt with most in common with these tokens."""
        best, best_no = 0, -1
        for no in self._buckets.get(_bucket_key(key, tokens), ()):
            num = common_prefix_length(self._entries[no].tokens, tokens)
            if num > best:
                best, best_no = num, no
        if best < MIN_PREFIX_TOKENS:
            return None
        self._entries.move_to_end(best_no)
        return PrefixMatch(self._entries[best_no].value, best)

    def add(self, key: Hashable, tokens: Tokens, value: Value) -> list[Value]:
        """Keep a prompt; returns what it makes needless."""
        if len(tokens) < MIN_PREFIX_TOKENS:
            return [value]
        bucket = _bucket_key(key, tokens)
        alike = self._buckets.setdefault(bucket, {})
        out = [no for no in alike if _starts_with(tokens, self._entries[no].tokens)]
        if len(alike) - len(out) >= _MAX_PER_BUCKET:
            out.append(next(no for no in self._entries if no in alike and no not in out))
        elif len(self._entries) - len(out) >= _MAX_PROMPTS:
            out.append(next(no for no in self._entries if no not in out))
        removed = [self._remove(no) for no in out]
        self._entries[self._next_id] = _PrefixEntry(bucket, tokens, value)
        self._buckets.setdefault(bucket, {})[self._next_id] = None
        self._next_id += 1
        return removed

    def evict_oldest(self, is_free: Callable[[Value], bool]) -> Value | None:
        """Forget the prompt that was not used for longest, of those that are free."""
        for no, entry in self._entries.items():
            if is_free(entry.value):
                return self._remove(no)
        return None

    def clear(self) -> list[Value]:
        """Forget all."""
        kept = [entry.value for entry in self._entries.values()]
        self._entries.clear()
        self._buckets.clear()
        return kept

    def _remove(self, no: int) -> Value:
        entry = self._entries.pop(no)
        alike = self._buckets[entry.bucket]
        del alike[no]
        if not alike:
            del self._buckets[entry.bucket]
        return entry.value


def common_prefix_length(one: Tokens, other: Tokens) -> int:
    """How many first tokens are the same."""
    num = min(len(one), len(other))
    differs = one[:num] != other[:num]
    first = int(differs.argmax()) if num else 0
    return first if num and differs[first] else num


def _starts_with(tokens: Tokens, prefix: Tokens) -> bool:
    return len(prefix) <= len(tokens) and common_prefix_length(tokens, prefix) == len(prefix)


def _bucket_key(key: Hashable, tokens: Tokens) -> Hashable:
    return key, tokens[:MIN_PREFIX_TOKENS].tobytes()
