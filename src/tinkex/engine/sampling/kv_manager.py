"""The memory of running samples: who lives where, and what makes room for whom."""

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
    """Sequences whose slots lie together; they take steps together."""

    def __init__(
        self, block: KVBlock, shared_prompt: PromptKV | None = None, *, is_bulk: bool
    ) -> None:
        self.block = block
        self.is_bulk = is_bulk
        """Whether its sequences are of tenants that have many."""
        self.shared_prompt = shared_prompt
        """The prompt that all of them began with, which their slots then leave out."""
        self.allocator: SlotAllocator[SequenceState] = SlotAllocator()
        self._lengths = np.zeros(block.num_slots, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.allocator)

    @property
    def lengths(self) -> Numbers:
        """How many tokens each slot holds."""
        return self._lengths[: len(self.allocator)]

    @property
    def positions(self) -> Numbers:
        """Where each sequence's next token stands."""
        first = self.shared_prompt.num_tokens if self.shared_prompt is not None else 0
        return self.lengths + first

    def full_sequences(self) -> list[SequenceState]:
        """Those that have no room for the next token."""
        slots = np.flatnonzero(self.lengths >= self.block.capacity)
        return [self.allocator[slot] for slot in slots.tolist()]

    def resize(self, num_slots: int) -> None:
        """Have more or fewer slots."""
        self.block.resize(num_slots, len(self))
        lengths = np.zeros(num_slots, dtype=np.int64)
        lengths[: len(self)] = self.lengths
        self._lengths = lengths

    def move_to(self, block: KVBlock) -> None:
        """Go on in another block of as many slots."""
        for slot in range(len(self)):
            block.copy_slot(slot, self.block, slot)
        self.block = block

    def add(self, sequence: SequenceState, num_tokens: int) -> int:
        """Take a slot; the caller fills it."""
        slot = self.allocator.allocate(sequence)
        self._lengths[slot] = num_tokens
        return slot

    def remove(self, sequence: SequenceState) -> None:
        """Give the slot back."""
        move = self.allocator.free(sequence)
        if move is not None:
            self.block.copy_slot(move.target, self.block, move.source)
            self._lengths[move.target] = self._lengths[move.source]

    def advance_lengths(self) -> None:
        """Note that everybody has one more token."""
        self.lengths[:] += 1


class KVCacheManager:
    """Keys and values of one base model, within a limit."""

    def __init__(self, spec: KVCacheSpec, max_bytes: int, *, enable_prefix_caching: bool) -> None:
        self._spec = spec
        self._budget = MemoryBudget(max_bytes)
        self.prefix_cache = PrefixCache(
            spec, self._budget, enable_prefix_caching=enable_prefix_caching
        )
        self._arenas: dict[tuple[bool, int], SlotGroup] = {}
        """By whether they are for bulk, and by capacity."""
        self._shared_groups: list[SlotGroup] = []
        self._group_of: dict[SequenceState, SlotGroup] = {}
        self.version = 0
        """Changes whenever somebody comes, goes or moves."""

    @property
    def used_bytes(self) -> int:
        """How much memory is given out."""
        return self._budget.used_bytes

    @property
    def max_bytes(self) -> int:
        """How much there is."""
        return self._budget.max_bytes

    @property
    def busy_bytes(self) -> int:
        """How much of it nobody could give back now."""
        return self._budget.used_bytes - self.prefix_cache.evictable_bytes

    @property
    def slot_groups(self) -> list[SlotGroup]:
        """Where sequences live, in the order in which they take steps."""
        arenas = (self._arenas[key] for key in sorted(self._arenas))
        return [room for room in (*arenas, *self._shared_groups) if len(room)]

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, sequence: SequenceState) -> bool:
        return sequence in self._group_of

    def allocate_prompt(self, num_tokens: int) -> PromptKV | None:
        """Memory for a prompt; None if there is none now."""
        has_room = self._evict_until_free(self.prefix_cache.num_bytes_for(num_tokens))
        return self.prefix_cache.allocate(num_tokens) if has_room else None

    # --- coming and going ------------------------------------------------------------------------
    def allocate(self, sequences: list[SequenceState], prompt_kv: PromptKV) -> int:
        """Let sequences live where they go on from a prompt; how many found a place."""
        for num in shared_group_sizes(len(sequences), prompt_kv.num_tokens):
            if self._allocate_shared(sequences[:num], prompt_kv):
                return num
        for index, sequence in enumerate(sequences):
            if not self._allocate_copy(sequence, prompt_kv):
                return index
        return len(sequences)

    def free(self, sequence: SequenceState) -> None:
        """Give back a sequence's place; one that has none is no error."""
        room = self._group_of.pop(sequence, None)
        if room is None:
            return
        self.version += 1
        room.remove(sequence)
        if not len(room) and room.shared_prompt is not None:
            self._shared_groups.remove(room)
            self._budget.reserve(-room.block.num_bytes)
            self.prefix_cache.release(room.shared_prompt)

    def grow(self) -> bool:
        """Give larger places to those that need one; False if somebody finds none."""
        for room in self.slot_groups:
            full = room.full_sequences()
            if not full:
                continue
            self.version += 1
            is_done = (
                self._move_to_larger(full) if room.shared_prompt is None else self._enlarge(room)
            )
            if not is_done:
                return False
        return True

    def clear(self) -> None:
        """Give back everything."""
        for sequence in list(self._group_of):
            self.free(sequence)
        self.prefix_cache.clear()
        self._free_empty_arenas()

    # --- places ----------------------------------------------------------------------------------
    def _allocate_shared(self, sequences: list[SequenceState], prompt_kv: PromptKV) -> bool:
        capacity = initial_capacity(0, sequences[0].spec.max_tokens)
        if not self._evict_until_free(self._num_bytes(len(sequences), capacity)):
            return False
        is_bulk = sequences[0].request.is_bulk
        room = SlotGroup(self._new_block(len(sequences), capacity), prompt_kv, is_bulk=is_bulk)
        self.version += 1
        self.prefix_cache.acquire(prompt_kv)
        self._shared_groups.append(room)
        for sequence in sequences:
            room.add(sequence, 0)
            self._group_of[sequence] = room
        return True

    def _allocate_copy(self, sequence: SequenceState, prompt_kv: PromptKV) -> bool:
        num_tokens = prompt_kv.num_tokens
        capacity = initial_capacity(num_tokens, sequence.spec.max_length)
        room = self._get_arena(capacity, is_bulk=sequence.request.is_bulk)
        if room is None:
            return False
        self.version += 1
        slot = room.add(sequence, num_tokens)
        room.block.load_prompt(slot, prompt_kv, num_tokens)
        self._group_of[sequence] = room
        return True

    def _move_to_larger(self, sequences: Iterable[SequenceState]) -> bool:
        for sequence in sequences:
            old = self._group_of[sequence]
            room = self._get_arena(2 * old.block.capacity, is_bulk=old.is_bulk)
            if room is None:
                return False
            slot = room.add(sequence, old.block.capacity)
            room.block.copy_slot(slot, old.block, old.allocator.slot_of(sequence))
            old.remove(sequence)
            self._group_of[sequence] = room
        return True

    def _enlarge(self, group: SlotGroup) -> bool:
        capacity = capacity_for(group.block.capacity + 1)
        if not self._evict_until_free(self._num_bytes(len(group), capacity)):
            return False
        old_bytes = group.block.num_bytes
        # A cohort only ever shrinks, so slots that were left are left out.
        group.move_to(self._new_block(len(group), capacity))
        self._budget.reserve(-old_bytes)
        return True

    def _get_arena(self, capacity: int, *, is_bulk: bool) -> SlotGroup | None:
        """The arena of a capacity, with a free slot; None if there is no memory for one."""
        room = self._arenas.get((is_bulk, capacity))
        num_slots = room.block.num_slots if room is not None else 0
        num_live = len(room) if room is not None else 0
        if room is not None and num_live < num_slots:
            return room
        for wanted in (grown_num_slots(num_slots, num_live + 1), num_live + 1):
            if self._evict_until_free(self._num_bytes(wanted - num_slots, capacity)):
                return self._resize_arena(capacity, wanted, is_bulk=is_bulk)
        return None

    def _resize_arena(self, capacity: int, num_slots: int, *, is_bulk: bool) -> SlotGroup:
        room = self._arenas.get((is_bulk, capacity))
        if room is None:
            room = SlotGroup(self._new_block(num_slots, capacity), is_bulk=is_bulk)
            self._arenas[is_bulk, capacity] = room
            return room
        num_new = num_slots - room.block.num_slots
        room.resize(num_slots)
        self._budget.reserve(self._num_bytes(num_new, capacity))
        return room

    def _new_block(self, num_slots: int, capacity: int) -> KVBlock:
        # First the memory, which may not be there, then the count of it.
        block = KVBlock(self._spec, num_slots, capacity)
        self._budget.reserve(block.num_bytes)
        return block

    # --- room ------------------------------------------------------------------------------------
    def _num_bytes(self, num_slots: int, capacity: int) -> int:
        return num_slots * capacity * self._spec.token_bytes

    def _evict_until_free(self, num_bytes: int) -> bool:
        """Have so much memory free, if what nobody needs is enough for that."""
        if num_bytes > self.max_bytes:
            return False
        while not self._budget.can_reserve(num_bytes):
            if not (self._free_empty_arenas() or self.prefix_cache.evict() or self._trim_arena()):
                return False
        return True

    def _free_empty_arenas(self) -> bool:
        empty = [key for key, room in self._arenas.items() if not len(room)]
        for key in empty:
            self._budget.reserve(-self._arenas.pop(key).block.num_bytes)
        return bool(empty)

    def _trim_arena(self) -> bool:
        """Give back the slots of one arena that nobody has."""
        for room in self._arenas.values():
            num_spare = room.block.num_slots - len(room)
            if num_spare:
                room.resize(len(room))
                self._budget.reserve(-self._num_bytes(num_spare, room.block.capacity))
                return True
        return False
