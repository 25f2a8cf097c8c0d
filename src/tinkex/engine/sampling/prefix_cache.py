"""Reference-counted KV caches of prompts, and the index that finds the longest cached prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tinkex.engine.sampling.request import Tokens
from tinkex.engine.sampling.slot_allocator import MemoryBudget

if TYPE_CHECKING:
    from tinkex.nn.kv_cache import KVCacheSpec, PromptKV

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


class PrefixCache:
    """Holds the KV caches of prompts while they are referenced by sequences or by the index."""

    def __init__(
        self, spec: KVCacheSpec, budget: MemoryBudget, *, enable_prefix_caching: bool
    ) -> None:
        self._spec = spec
        self._budget = budget
        self._enable_prefix_caching = enable_prefix_caching
        self._index: PrefixIndex[PromptKV] = PrefixIndex()
        self._ref_counts: dict[PromptKV, int] = {}

    def __len__(self) -> int:
        return len(self._ref_counts)

    def num_bytes_for(self, num_tokens: int) -> int:
        """The size of a prompt's KV cache."""
        return num_tokens * self._spec.token_bytes

    def allocate(self, num_tokens: int) -> PromptKV:
        """Allocate a prompt with one reference; the caller has checked the budget."""
        prompt_kv = self._spec.allocate_prompt(num_tokens)
        self._budget.reserve(prompt_kv.num_bytes)
        self._ref_counts[prompt_kv] = 1
        return prompt_kv

    def acquire(self, prompt_kv: PromptKV) -> None:
        """Add a reference."""
        self._ref_counts[prompt_kv] += 1

    def release(self, prompt_kv: PromptKV) -> None:
        """Remove a reference; the last one frees the memory."""
        self._ref_counts[prompt_kv] -= 1
        if not self._ref_counts[prompt_kv]:
            del self._ref_counts[prompt_kv]
            self._budget.reserve(-prompt_kv.num_bytes)

    @property
    def evictable_bytes(self) -> int:
        """The memory that is referenced only by the index."""
        indexed = {id(prompt_kv) for prompt_kv in self._index}
        return sum(
            prompt_kv.num_bytes
            for prompt_kv, num in self._ref_counts.items()
            if num == 1 and id(prompt_kv) in indexed
        )

    # --- prefix caching --------------------------------------------------------------------------
    def find_prefix(self, key: Hashable, tokens: Tokens) -> PrefixMatch[PromptKV] | None:
        """Find the cached prompt with the longest common prefix."""
        return self._index.find(key, tokens) if self._enable_prefix_caching else None

    def insert(self, key: Hashable, tokens: Tokens, prompt_kv: PromptKV) -> None:
        """Make a prompt available to later requests."""
        if not self._enable_prefix_caching:
            return
        self.acquire(prompt_kv)
        for replaced in self._index.add(key, tokens, prompt_kv):
            self.release(replaced)

    def evict(self) -> bool:
        """Evict the least recently used prompt; returns False if all are in use."""
        evicted = self._index.evict_oldest(lambda prompt_kv: self._ref_counts[prompt_kv] == 1)
        if evicted is None:
            return False
        self.release(evicted)
        return True

    def clear(self) -> None:
        """Remove all prompts from the index; those in use stay in memory."""
        for prompt_kv in self._index.clear():
            self.release(prompt_kv)
