"""Reference-counted KV caches of prompts, and the prefix cache for later prompts."""

from __future__ import annotations

from collections.abc import Hashable

from tinkex.engine.sampling.prefix_index import PrefixIndex, PrefixMatch
from tinkex.engine.sampling.request import Tokens
from tinkex.engine.sampling.slot_allocator import MemoryBudget
from tinkex.nn.kv_cache import KVCacheSpec, PromptKV


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
        prompt_kv = PromptKV(self._spec, num_tokens)
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
