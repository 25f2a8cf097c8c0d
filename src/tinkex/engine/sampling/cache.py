"""The memory of running samples: who lives where, and what makes room for whom."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tinkex.engine.sampling.case import Sequence
from tinkex.engine.sampling.scheduler import cohort_sizes
from tinkex.engine.sampling.shelf import Shelf
from tinkex.engine.sampling.slots import Budget, Roster, capacity_for, first_capacity, slots_for
from tinkex.nn.kept import KVBlock, KVCacheSpec, PromptKV

Numbers = npt.NDArray[np.int64]


class Room:
    """Sequences whose slots lie together; they take steps together."""

    def __init__(self, block: KVBlock, shared: PromptKV | None = None, *, is_bulk: bool) -> None:
        self.block = block
        self.is_bulk = is_bulk
        """Whether its sequences are of tenants that have many."""
        self.shared = shared
        """The prompt that all of them began with, which their slots then leave out."""
        self.roster: Roster[Sequence] = Roster()
        self._lengths = np.zeros(block.num_slots, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.roster)

    @property
    def lengths(self) -> Numbers:
        """How many tokens each slot holds."""
        return self._lengths[: len(self.roster)]

    @property
    def positions(self) -> Numbers:
        """Where each sequence's next token stands."""
        first = self.shared.num_tokens if self.shared is not None else 0
        return self.lengths + first

    def full(self) -> list[Sequence]:
        """Those that have no room for the next token."""
        slots = np.flatnonzero(self.lengths >= self.block.capacity)
        return [self.roster[slot] for slot in slots.tolist()]

    def resize(self, num_slots: int) -> None:
        """Have more or fewer slots."""
        self.block.resize(num_slots, len(self))
        lengths = np.zeros(num_slots, dtype=np.int64)
        lengths[: len(self)] = self.lengths
        self._lengths = lengths

    def replace(self, block: KVBlock) -> None:
        """Go on in another block of as many slots."""
        for slot in range(len(self)):
            block.copy_slot(slot, self.block, slot)
        self.block = block

    def enter(self, sequence: Sequence, num_tokens: int) -> int:
        """Take a slot; the caller fills it."""
        slot = self.roster.enter(sequence)
        self._lengths[slot] = num_tokens
        return slot

    def leave(self, sequence: Sequence) -> None:
        """Give the slot back."""
        move = self.roster.leave(sequence)
        if move is not None:
            self.block.copy_slot(move.target, self.block, move.source)
            self._lengths[move.target] = self._lengths[move.source]

    def advance(self) -> None:
        """Note that everybody has one more token."""
        self.lengths[:] += 1


class Cache:
    """Keys and values of one base model, within a limit."""

    def __init__(self, kind: KVCacheSpec, max_bytes: int, *, has_prefixes: bool) -> None:
        self._kind = kind
        self._budget = Budget(max_bytes)
        self.shelf = Shelf(kind, self._budget, has_prefixes=has_prefixes)
        self._arenas: dict[tuple[bool, int], Room] = {}
        """By whether they are for bulk, and by capacity."""
        self._cohorts: list[Room] = []
        self._homes: dict[Sequence, Room] = {}
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
        return self._budget.used_bytes - self.shelf.idle_bytes

    @property
    def rooms(self) -> list[Room]:
        """Where sequences live, in the order in which they take steps."""
        arenas = (self._arenas[key] for key in sorted(self._arenas))
        return [room for room in (*arenas, *self._cohorts) if len(room)]

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._homes

    def store(self, num_tokens: int) -> PromptKV | None:
        """Memory for a prompt; None if there is none now."""
        has_room = self._make_room(self.shelf.size_of(num_tokens))
        return self.shelf.new(num_tokens) if has_room else None

    # --- coming and going ------------------------------------------------------------------------
    def place(self, sequences: list[Sequence], stored: PromptKV) -> int:
        """Let sequences live where they go on from a prompt; how many found a place."""
        for num in cohort_sizes(len(sequences), stored.num_tokens):
            if self._place_together(sequences[:num], stored):
                return num
        for index, sequence in enumerate(sequences):
            if not self._place_copy(sequence, stored):
                return index
        return len(sequences)

    def leave(self, sequence: Sequence) -> None:
        """Give back a sequence's place; one that has none is no error."""
        room = self._homes.pop(sequence, None)
        if room is None:
            return
        self.version += 1
        room.leave(sequence)
        if not len(room) and room.shared is not None:
            self._cohorts.remove(room)
            self._budget.take(-room.block.num_bytes)
            self.shelf.release(room.shared)

    def grow(self) -> bool:
        """Give larger places to those that need one; False if somebody finds none."""
        for room in self.rooms:
            full = room.full()
            if not full:
                continue
            self.version += 1
            is_done = self._move_up(full) if room.shared is None else self._enlarge(room)
            if not is_done:
                return False
        return True

    def clear(self) -> None:
        """Give back everything."""
        for sequence in list(self._homes):
            self.leave(sequence)
        self.shelf.clear()
        self._drop_empty()

    # --- places ----------------------------------------------------------------------------------
    def _place_together(self, sequences: list[Sequence], stored: PromptKV) -> bool:
        capacity = first_capacity(0, sequences[0].ask.max_tokens)
        if not self._make_room(self._size_of(len(sequences), capacity)):
            return False
        is_bulk = sequences[0].case.is_bulk
        room = Room(self._new_block(len(sequences), capacity), stored, is_bulk=is_bulk)
        self.version += 1
        self.shelf.hold(stored)
        self._cohorts.append(room)
        for sequence in sequences:
            room.enter(sequence, 0)
            self._homes[sequence] = room
        return True

    def _place_copy(self, sequence: Sequence, stored: PromptKV) -> bool:
        num_tokens = stored.num_tokens
        capacity = first_capacity(num_tokens, sequence.ask.max_length)
        room = self._arena(capacity, is_bulk=sequence.case.is_bulk)
        if room is None:
            return False
        self.version += 1
        slot = room.enter(sequence, num_tokens)
        room.block.load_prompt(slot, stored, num_tokens)
        self._homes[sequence] = room
        return True

    def _move_up(self, sequences: Iterable[Sequence]) -> bool:
        for sequence in sequences:
            old = self._homes[sequence]
            room = self._arena(2 * old.block.capacity, is_bulk=old.is_bulk)
            if room is None:
                return False
            slot = room.enter(sequence, old.block.capacity)
            room.block.copy_slot(slot, old.block, old.roster.slot_of(sequence))
            old.leave(sequence)
            self._homes[sequence] = room
        return True

    def _enlarge(self, room: Room) -> bool:
        capacity = capacity_for(room.block.capacity + 1)
        if not self._make_room(self._size_of(len(room), capacity)):
            return False
        old_bytes = room.block.num_bytes
        # A cohort only ever shrinks, so slots that were left are left out.
        room.replace(self._new_block(len(room), capacity))
        self._budget.take(-old_bytes)
        return True

    def _arena(self, capacity: int, *, is_bulk: bool) -> Room | None:
        """The arena of a capacity, with a free slot; None if there is no memory for one."""
        room = self._arenas.get((is_bulk, capacity))
        num_slots = room.block.num_slots if room is not None else 0
        num_live = len(room) if room is not None else 0
        if room is not None and num_live < num_slots:
            return room
        for wanted in (slots_for(num_slots, num_live + 1), num_live + 1):
            if self._make_room(self._size_of(wanted - num_slots, capacity)):
                return self._with_slots(capacity, wanted, is_bulk=is_bulk)
        return None

    def _with_slots(self, capacity: int, num_slots: int, *, is_bulk: bool) -> Room:
        room = self._arenas.get((is_bulk, capacity))
        if room is None:
            room = Room(self._new_block(num_slots, capacity), is_bulk=is_bulk)
            self._arenas[is_bulk, capacity] = room
            return room
        num_new = num_slots - room.block.num_slots
        room.resize(num_slots)
        self._budget.take(self._size_of(num_new, capacity))
        return room

    def _new_block(self, num_slots: int, capacity: int) -> KVBlock:
        # First the memory, which may not be there, then the count of it.
        block = KVBlock(self._kind, num_slots, capacity)
        self._budget.take(block.num_bytes)
        return block

    # --- room ------------------------------------------------------------------------------------
    def _size_of(self, num_slots: int, capacity: int) -> int:
        return num_slots * capacity * self._kind.token_bytes

    def _make_room(self, num_bytes: int) -> bool:
        """Have so much memory free, if what nobody needs is enough for that."""
        if num_bytes > self.max_bytes:
            return False
        while not self._budget.has(num_bytes):
            if not (self._drop_empty() or self.shelf.evict() or self._trim()):
                return False
        return True

    def _drop_empty(self) -> bool:
        empty = [key for key, room in self._arenas.items() if not len(room)]
        for key in empty:
            self._budget.take(-self._arenas.pop(key).block.num_bytes)
        return bool(empty)

    def _trim(self) -> bool:
        """Give back the slots of one arena that nobody has."""
        for room in self._arenas.values():
            num_spare = room.block.num_slots - len(room)
            if num_spare:
                room.resize(len(room))
                self._budget.take(-self._size_of(num_spare, room.block.capacity))
                return True
        return False
