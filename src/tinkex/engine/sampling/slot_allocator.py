"""Slot allocation: capacities, the assignment of slots to sequences, and a memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

#: The smallest slot capacity in tokens; capacities double.
MIN_CAPACITY = 64
#: Free tokens that a new sequence should have in its slot.
_HEADROOM_TOKENS = 32

Item = TypeVar("Item")


def capacity_for(num_tokens: int) -> int:
    """The smallest capacity for a number of tokens."""
    capacity = MIN_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity


def initial_capacity(num_tokens: int, max_tokens: int) -> int:
    """The first capacity of a sequence that has `num_tokens` and may grow to `max_tokens`."""
    return capacity_for(min(num_tokens + _HEADROOM_TOKENS, max_tokens))


def grown_num_slots(num_now: int, num_wanted: int) -> int:
    """The new number of slots when more are needed: doubled, so that resizing is rare."""
    return max(num_wanted, 2 * num_now)


class SlotMove(NamedTuple):
    """Copy the contents of one slot to another."""

    source: int
    target: int


class SlotAllocator(Generic[Item]):
    """Assigns slots to items; the used slots are always the first ones."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._slot_by_id: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __getitem__(self, slot: int) -> Item:
        return self._items[slot]

    def slot_of(self, item: Item) -> int:
        """The slot of an item."""
        return self._slot_by_id[id(item)]

    def allocate(self, item: Item) -> int:
        """Assign the first free slot."""
        slot = self._slot_by_id[id(item)] = len(self._items)
        self._items.append(item)
        return slot

    def free(self, item: Item) -> SlotMove | None:
        """Free a slot; returns the move of the last item into the gap, if needed."""
        slot = self._slot_by_id.pop(id(item))
        last = self._items.pop()
        if last is item:
            return None
        self._items[slot] = last
        self._slot_by_id[id(last)] = slot
        return SlotMove(source=len(self._items), target=slot)


@dataclass(slots=True)
class MemoryBudget:
    """Counts reserved memory up to a limit."""

    max_bytes: int
    used_bytes: int = 0

    def can_reserve(self, num_bytes: int) -> bool:
        """Whether this much memory is free."""
        return self.used_bytes + num_bytes <= self.max_bytes

    def reserve(self, num_bytes: int) -> None:
        """Reserve memory; a negative number frees it."""
        self.used_bytes += num_bytes
        assert 0 <= self.used_bytes <= self.max_bytes
