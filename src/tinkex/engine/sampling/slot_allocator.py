"""Where sequences live: how large a place is, who has which slot, and how much memory is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

#: The smallest place, in tokens; each larger one is twice the size.
MIN_CAPACITY = 64
#: How many more tokens than it has a newcomer should have room for.
_HEADROOM_TOKENS = 32

Item = TypeVar("Item")


def capacity_for(num_tokens: int) -> int:
    """The smallest capacity that holds so many tokens."""
    capacity = MIN_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity


def initial_capacity(num_tokens: int, max_tokens: int) -> int:
    """Where a sequence of some tokens that may become longer begins."""
    return capacity_for(min(num_tokens + _HEADROOM_TOKENS, max_tokens))


def grown_num_slots(num_now: int, num_wanted: int) -> int:
    """How many slots to make when more are wanted: twice as many, so that it is seldom done."""
    return max(num_wanted, 2 * num_now)


class SlotMove(NamedTuple):
    """What lies in one slot goes to another."""

    source: int
    target: int


class SlotAllocator(Generic[Item]):
    """Who has which slot; the slots in use are always the first ones."""

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
        """Which slot it has."""
        return self._slot_by_id[id(item)]

    def allocate(self, item: Item) -> int:
        """Take the first free slot."""
        slot = self._slot_by_id[id(item)] = len(self._items)
        self._items.append(item)
        return slot

    def free(self, item: Item) -> SlotMove | None:
        """Give a slot back; the last one moves into the gap, if it is another."""
        slot = self._slot_by_id.pop(id(item))
        last = self._items.pop()
        if last is item:
            return None
        self._items[slot] = last
        self._slot_by_id[id(last)] = slot
        return SlotMove(source=len(self._items), target=slot)


@dataclass(slots=True)
class MemoryBudget:
    """Memory that is given out up to a limit."""

    max_bytes: int
    used_bytes: int = 0

    def can_reserve(self, num_bytes: int) -> bool:
        """Whether so much is left."""
        return self.used_bytes + num_bytes <= self.max_bytes

    def reserve(self, num_bytes: int) -> None:
        """Give out memory; a negative number takes it back."""
        self.used_bytes += num_bytes
        assert 0 <= self.used_bytes <= self.max_bytes
