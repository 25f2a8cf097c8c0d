"""Where sequences live: how large a place is, who has which slot, and how much memory is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

#: The smallest place, in tokens; each larger one is twice the size.
MIN_CAPACITY = 64
#: How many more tokens than it has a newcomer should have room for.
_HEADROOM = 32

Tenant = TypeVar("Tenant")


def capacity_for(num_tokens: int) -> int:
    """The smallest capacity that holds so many tokens."""
    capacity = MIN_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity


def first_capacity(num_tokens: int, max_tokens: int) -> int:
    """Where a sequence of some tokens that may become longer begins."""
    return capacity_for(min(num_tokens + _HEADROOM, max_tokens))


def slots_for(num_now: int, num_wanted: int) -> int:
    """How many slots to make when more are wanted: twice as many, so that it is seldom done."""
    return max(num_wanted, 2 * num_now)


class Move(NamedTuple):
    """What lies in one slot goes to another."""

    source: int
    target: int


class Roster(Generic[Tenant]):
    """Who has which slot; the slots in use are always the first ones."""

    def __init__(self) -> None:
        self._slots: list[Tenant] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._slots)

    def __getitem__(self, slot: int) -> Tenant:
        return self._slots[slot]

    def slot_of(self, tenant: Tenant) -> int:
        """Which slot it has."""
        return self._places[id(tenant)]

    def enter(self, tenant: Tenant) -> int:
        """Take the first free slot."""
        slot = self._places[id(tenant)] = len(self._slots)
        self._slots.append(tenant)
        return slot

    def leave(self, tenant: Tenant) -> Move | None:
        """Give a slot back; the last one moves into the gap, if it is another."""
        slot = self._places.pop(id(tenant))
        last = self._slots.pop()
        if last is tenant:
            return None
        self._slots[slot] = last
        self._places[id(last)] = slot
        return Move(source=len(self._slots), target=slot)


@dataclass(slots=True)
class Budget:
    """Memory that is given out up to a limit."""

    max_bytes: int
    used_bytes: int = 0

    def has(self, num_bytes: int) -> bool:
        """Whether so much is left."""
        return self.used_bytes + num_bytes <= self.max_bytes

    def take(self, num_bytes: int) -> None:
        """Give out memory; a negative number takes it back."""
        self.used_bytes += num_bytes
        assert 0 <= self.used_bytes <= self.max_bytes
