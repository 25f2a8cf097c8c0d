"""Prompts in memory: used by samples that begin with them, and kept for prompts that will."""

from __future__ import annotations

from collections.abc import Hashable

from tinkex.engine.sampling.prefix_index import PrefixIndex, PrefixMatch
from tinkex.engine.sampling.request import Tokens
from tinkex.engine.sampling.slot_allocator import MemoryBudget
from tinkex.nn.kv_cache import KVCacheSpec, PromptKV


class PrefixCache:
    """What was read of prompts; each is there until its last user lets go of it."""

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
        """How many bytes a prompt takes."""
        return num_tokens * self._spec.token_bytes

    def allocate(self, num_tokens: int) -> PromptKV:
        """Memory for a prompt, with one user; the budget must have it."""
        stored = PromptKV(self._spec, num_tokens)
        self._budget.reserve(stored.num_bytes)
        self._ref_counts[stored] = 1
        return stored

    def acquire(self, prompt_kv: PromptKV) -> None:
        """Have one more user."""
        self._ref_counts[prompt_kv] += 1

    def release(self, prompt_kv: PromptKV) -> None:
        """Have one user less."""
        self._ref_counts[prompt_kv] -= 1
        if not self._ref_counts[prompt_kv]:
            del self._ref_counts[prompt_kv]
            self._budget.reserve(-prompt_kv.num_bytes)

    @property
    def evictable_bytes(self) -> int:
        """How much is kept for prompts to come alone."""
        kept = {id(stored) for stored in self._index}
        return sum(
            stored.num_bytes
            for stored, num in self._ref_counts.items()
            if num == 1 and id(stored) in kept
        )

    # --- for prompts to come ---------------------------------------------------------------------
    def find_prefix(self, key: Hashable, tokens: Tokens) -> PrefixMatch[PromptKV] | None:
        """What is kept of a prompt that begins like this one."""
        return self._index.find(key, tokens) if self._enable_prefix_caching else None

    def insert(self, key: Hashable, tokens: Tokens, prompt_kv: PromptKV) -> None:
        """Let later prompts begin with this one."""
        if not self._enable_prefix_caching:
            return
        self.acquire(prompt_kv)
        for needless in self._index.add(key, tokens, prompt_kv):
            self.release(needless)

    def evict(self) -> bool:
        """Forget the prompt that was not used for longest; False if all are in use."""
        dropped = self._index.evict_oldest(lambda stored: self._ref_counts[stored] == 1)
        if dropped is None:
            return False
        self.release(dropped)
        return True

    def clear(self) -> None:
        """Forget all that nobody uses."""
        for stored in self._index.clear():
            self.release(stored)
