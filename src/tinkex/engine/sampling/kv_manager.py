"""Manages the KV cache of running sequences: slots, growth and eviction within a memory limit."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tinkex.engine.sampling.prefix_cache import PrefixCache
from tinkex.engine.sampling.request_state import SequenceState
from tinkex.engine.sampling.scheduler import shared_group_sizes
from tinkex.engine.sampling.slot_allocator import (
    MemoryBudget,
    SlotAllocator,
    capacity_for,
    grown_num_slots,
    initial_capacity,
)
from tinkex.nn.kv_cache import KVBlock, KVCacheSpec, PromptKV

Numbers = npt.NDArray[np.int64]


class SlotGroup:
    """Sequences whose KV slots are in one block; they decode together."""

    def __init__(
        self, block: KVBlock, shared_prompt: PromptKV | None = None, *, is_bulk: bool
    ) -> None:
        self.block = block
        self.is_bulk = is_bulk
        """Whether its sequences belong to bulk tenants."""
        self.shared_prompt = shared_prompt
        """The common prompt of all sequences, which their slots do not contain; None if copied."""
        self.allocator: SlotAllocator[SequenceState] = SlotAllocator()
        self._lengths = np.zeros(block.num_slots, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.allocator)

    @property
    def lengths(self) -> Numbers:
        """The number of tokens in each slot."""
        return self._lengths[: len(self.allocator)]

    @property
    def positions(self) -> Numbers:
        """The position of each sequence's next token."""
        first = self.shared_prompt.num_tokens if self.shared_prompt is not None else 0
        return self.lengths + first

    def full_sequences(self) -> list[SequenceState]:
        """The sequences whose slots are full."""
        slots = np.flatnonzero(self.lengths >= self.block.capacity)
        return [self.allocator[slot] for slot in slots.tolist()]

    def resize(self, num_slots: int) -> None:
        """Change the number of slots."""
        self.block.resize(num_slots, len(self))
        lengths = np.zeros(num_slots, dtype=np.int64)
        lengths[: len(self)] = self.lengths
        self._lengths = lengths

    def move_to(self, block: KVBlock) -> None:
        """Move all sequences to another block."""
        for slot in range(len(self)):
            block.copy_slot(slot, self.block, slot)
        self.block = block

    def add(self, sequence: SequenceState, num_tokens: int) -> int:
        """Assign a slot, which the caller fills."""
        slot = self.allocator.allocate(sequence)
        self._lengths[slot] = num_tokens
        return slot

    def remove(self, sequence: SequenceState) -> None:
        """Free a slot; the last sequence moves into the gap."""
        move = self.allocator.free(sequence)
        if move is not None:
            self.block.copy_slot(move.target, self.block, move.source)
            self._lengths[move.target] = self._lengths[move.source]

    def advance_lengths(self) -> None:
        """Add one token to the length of every slot."""
        self.lengths[:] += 1


class KVCacheManager:
    """The KV cache of one base model, within a memory limit.

    Sequences have slots in arenas, which are slot groups of one capacity, or in a shared group that
    refers to their common prompt.
    """

    def __init__(self, spec: KVCacheSpec, max_bytes: int, *, enable_prefix_caching: bool) -> None:
        self._spec = spec
        self._budget = MemoryBudget(max_bytes)
        self.prefix_cache = PrefixCache(
            spec, self._budget, enable_prefix_caching=enable_prefix_caching
        )
        self._arenas: dict[tuple[bool, int], SlotGroup] = {}
        """By `is_bulk` and capacity."""
        self._shared_groups: list[SlotGroup] = []
        self._group_of: dict[SequenceState, SlotGroup] = {}
        self.version = 0
        """Increases whenever a sequence is added, removed or moved."""

    @property
    def used_bytes(self) -> int:
        """The reserved memory."""
        return self._budget.used_bytes

    @property
    def max_bytes(self) -> int:
        """The memory limit."""
        return self._budget.max_bytes

    @property
    def busy_bytes(self) -> int:
        """The reserved memory that cannot be evicted."""
        return self._budget.used_bytes - self.prefix_cache.evictable_bytes

    @property
    def slot_groups(self) -> list[SlotGroup]:
        """The groups that have sequences, in decode order."""
        arenas = (self._arenas[key] for key in sorted(self._arenas))
        return [group for group in (*arenas, *self._shared_groups) if len(group)]

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, sequence: SequenceState) -> bool:
        return sequence in self._group_of

    def allocate_prompt(self, num_tokens: int) -> PromptKV | None:
        """Allocate memory for a prompt; returns None if there is not enough."""
        is_free = self._evict_until_free(self.prefix_cache.num_bytes_for(num_tokens))
        return self.prefix_cache.allocate(num_tokens) if is_free else None

    # --- sequences -------------------------------------------------------------------------------
    def allocate(self, sequences: list[SequenceState], prompt_kv: PromptKV) -> int:
        """Allocate slots for sequences of a prompt; returns how many were allocated."""
        for num in shared_group_sizes(len(sequences), prompt_kv.num_tokens):
            if self._allocate_shared(sequences[:num], prompt_kv):
                return num
        for index, sequence in enumerate(sequences):
            if not self._allocate_copy(sequence, prompt_kv):
                return index
        return len(sequences)

    def free(self, sequence: SequenceState) -> None:
        """Free a sequence's slot; does nothing if it has none."""
        group = self._group_of.pop(sequence, None)
        if group is None:
            return
        self.version += 1
        group.remove(sequence)
        if not len(group) and group.shared_prompt is not None:
            self._shared_groups.remove(group)
            self._budget.reserve(-group.block.num_bytes)
            self.prefix_cache.release(group.shared_prompt)

    def grow(self) -> bool:
        """Enlarge the slots of full sequences; returns False if memory runs out."""
        for group in self.slot_groups:
            full = group.full_sequences()
            if not full:
                continue
            self.version += 1
            is_done = (
                self._move_to_larger(full) if group.shared_prompt is None else self._enlarge(group)
            )
            if not is_done:
                return False
        return True

    def clear(self) -> None:
        """Free all memory."""
        for sequence in list(self._group_of):
            self.free(sequence)
        self.prefix_cache.clear()
        self._free_empty_arenas()

    # --- slot groups -----------------------------------------------------------------------------
    def _allocate_shared(self, sequences: list[SequenceState], prompt_kv: PromptKV) -> bool:
        capacity = initial_capacity(0, sequences[0].spec.max_tokens)
        if not self._evict_until_free(self._num_bytes(len(sequences), capacity)):
            return False
        is_bulk = sequences[0].request.is_bulk
        group = SlotGroup(self._new_block(len(sequences), capacity), prompt_kv, is_bulk=is_bulk)
        self.version += 1
        self.prefix_cache.acquire(prompt_kv)
        self._shared_groups.append(group)
        for sequence in sequences:
            group.add(sequence, 0)
            self._group_of[sequence] = group
        return True

    def _allocate_copy(self, sequence: SequenceState, prompt_kv: PromptKV) -> bool:
        num_tokens = prompt_kv.num_tokens
        capacity = initial_capacity(num_tokens, sequence.spec.max_length)
        group = self._get_arena(capacity, is_bulk=sequence.request.is_bulk)
        if group is None:
            return False
        self.version += 1
        slot = group.add(sequence, num_tokens)
        group.block.load_prompt(slot, prompt_kv, num_tokens)
        self._group_of[sequence] = group
        return True

    def _move_to_larger(self, sequences: Iterable[SequenceState]) -> bool:
        for sequence in sequences:
            old = self._group_of[sequence]
            group = self._get_arena(2 * old.block.capacity, is_bulk=old.is_bulk)
            if group is None:
                return False
            slot = group.add(sequence, old.block.capacity)
            group.block.copy_slot(slot, old.block, old.allocator.slot_of(sequence))
            old.remove(sequence)
            self._group_of[sequence] = group
        return True

    def _enlarge(self, group: SlotGroup) -> bool:
        capacity = capacity_for(group.block.capacity + 1)
        if not self._evict_until_free(self._num_bytes(len(group), capacity)):
            return False
        old_bytes = group.block.num_bytes
        # A shared group never gets new sequences, so the new block has no free slots.
        group.move_to(self._new_block(len(group), capacity))
        self._budget.reserve(-old_bytes)
        return True

    def _get_arena(self, capacity: int, *, is_bulk: bool) -> SlotGroup | None:
        """An arena of this capacity with a free slot; None if there is not enough memory."""
        group = self._arenas.get((is_bulk, capacity))
        num_slots = group.block.num_slots if group is not None else 0
        num_live = len(group) if group is not None else 0
        if group is not None and num_live < num_slots:
            return group
        for num_wanted in (grown_num_slots(num_slots, num_live + 1), num_live + 1):
            if self._evict_until_free(self._num_bytes(num_wanted - num_slots, capacity)):
                return self._resize_arena(capacity, num_wanted, is_bulk=is_bulk)
        return None

    def _resize_arena(self, capacity: int, num_slots: int, *, is_bulk: bool) -> SlotGroup:
        group = self._arenas.get((is_bulk, capacity))
        if group is None:
            group = SlotGroup(self._new_block(num_slots, capacity), is_bulk=is_bulk)
            self._arenas[is_bulk, capacity] = group
            return group
        num_new = num_slots - group.block.num_slots
        group.resize(num_slots)
        self._budget.reserve(self._num_bytes(num_new, capacity))
        return group

    def _new_block(self, num_slots: int, capacity: int) -> KVBlock:
        # Allocate first, because that may fail, then count.
        block = KVBlock(self._spec, num_slots, capacity)
        self._budget.reserve(block.num_bytes)
        return block

    # --- memory ----------------------------------------------------------------------------------
    def _num_bytes(self, num_slots: int, capacity: int) -> int:
        return num_slots * capacity * self._spec.token_bytes

    def _evict_until_free(self, num_bytes: int) -> bool:
        """Evict unused memory until this much is free; returns False if that is not enough."""
        if num_bytes > self.max_bytes:
            return False
        while not self._budget.can_reserve(num_bytes):
            if not (self._free_empty_arenas() or self.prefix_cache.evict() or self._trim_arena()):
                return False
        return True

    def _free_empty_arenas(self) -> bool:
        empty = [key for key, group in self._arenas.items() if not len(group)]
        for key in empty:
            self._budget.reserve(-self._arenas.pop(key).block.num_bytes)
        return bool(empty)

    def _trim_arena(self) -> bool:
        """Free the unused slots of one arena."""
        for group in self._arenas.values():
            num_spare = group.block.num_slots - len(group)
            if num_spare:
                group.resize(len(group))
                self._budget.reserve(-self._num_bytes(num_spare, group.block.capacity))
                return True
        return False
