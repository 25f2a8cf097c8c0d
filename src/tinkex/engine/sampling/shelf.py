"""Prompts in memory: used by samples that begin with them, and kept for prompts that will."""

from __future__ import annotations

from collections.abc import Hashable

from tinkex.engine.sampling.asks import Tokens
from tinkex.engine.sampling.prefixes import Match, Prefixes
from tinkex.engine.sampling.slots import Budget
from tinkex.nn.kept import KVCacheSpec, PromptKV


class Shelf:
    """What was read of prompts; each is there until its last user lets go of it."""

    def __init__(self, kind: KVCacheSpec, budget: Budget, *, has_prefixes: bool) -> None:
        self._kind = kind
        self._budget = budget
        self._has_prefixes = has_prefixes
        self._prefixes: Prefixes[PromptKV] = Prefixes()
        self._num_users: dict[PromptKV, int] = {}

    def __len__(self) -> int:
        return len(self._num_users)

    def size_of(self, num_tokens: int) -> int:
        """How many bytes a prompt takes."""
        return num_tokens * self._kind.token_bytes

    def new(self, num_tokens: int) -> PromptKV:
        """Memory for a prompt, with one user; the budget must have it."""
        stored = PromptKV(self._kind, num_tokens)
        self._budget.take(stored.num_bytes)
        self._num_users[stored] = 1
        return stored

    def hold(self, stored: PromptKV) -> None:
        """Have one more user."""
        self._num_users[stored] += 1

    def release(self, stored: PromptKV) -> None:
        """Have one user less."""
        self._num_users[stored] -= 1
        if not self._num_users[stored]:
            del self._num_users[stored]
            self._budget.take(-stored.num_bytes)

    @property
    def idle_bytes(self) -> int:
        """How much is kept for prompts to come alone."""
        kept = {id(stored) for stored in self._prefixes}
        return sum(
            stored.num_bytes
            for stored, num in self._num_users.items()
            if num == 1 and id(stored) in kept
        )

    # --- for prompts to come ---------------------------------------------------------------------
    def find(self, key: Hashable, tokens: Tokens) -> Match[PromptKV] | None:
        """What is kept of a prompt that begins like this one."""
        return self._prefixes.find(key, tokens) if self._has_prefixes else None

    def keep(self, key: Hashable, tokens: Tokens, stored: PromptKV) -> None:
        """Let later prompts begin with this one."""
        if not self._has_prefixes:
            return
        self.hold(stored)
        for needless in self._prefixes.add(key, tokens, stored):
            self.release(needless)

    def evict(self) -> bool:
        """Forget the prompt that was not used for longest; False if all are in use."""
        dropped = self._prefixes.drop_oldest(lambda stored: self._num_users[stored] == 1)
        if dropped is None:
            return False
        self.release(dropped)
        return True

    def clear(self) -> None:
        """Forget all that nobody uses."""
        for stored in self._prefixes.clear():
            self.release(stored)
