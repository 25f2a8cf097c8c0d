"""Slot allocation and the memory budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.sampling.slot_allocator import (
    MIN_CAPACITY,
    MemoryBudget,
    SlotAllocator,
    SlotMove,
    capacity_for,
    grown_num_slots,
    initial_capacity,
)


class _Tenant:
    pass


@given(st.integers(1, 100_000))
def test_capacity_is_sufficient_and_at_most_double(num_tokens: int) -> None:
    capacity = capacity_for(num_tokens)
    assert capacity >= num_tokens
    assert capacity == MIN_CAPACITY or capacity < 2 * num_tokens


def test_initial_capacity_has_bounded_headroom() -> None:
    assert initial_capacity(64, 1000) == 128
    assert initial_capacity(63, 64) == 64


def test_slots_double_when_growing() -> None:
    assert grown_num_slots(0, 1) == 1
    assert grown_num_slots(4, 5) == 8
    assert grown_num_slots(4, 20) == 20


def test_last_item_moves_into_freed_slot() -> None:
    roster: SlotAllocator[_Tenant] = SlotAllocator()
    tenants = [_Tenant() for _ in range(4)]
    assert [roster.allocate(one) for one in tenants] == [0, 1, 2, 3]
    assert roster.free(tenants[1]) == SlotMove(source=3, target=1)
    assert roster.slot_of(tenants[3]) == 1
    assert roster.free(tenants[2]) is None


@given(st.lists(st.integers(0, 30), max_size=60))
def test_used_slots_are_dense(choices: list[int]) -> None:
    roster: SlotAllocator[_Tenant] = SlotAllocator()
    memory: dict[int, _Tenant] = {}
    living: list[_Tenant] = []
    for choice in choices:
        if choice % 3 and living:
            tenant = living.pop(choice % len(living))
            move = roster.free(tenant)
            if move is not None:
                memory[move.target] = memory[move.source]
        else:
            tenant = _Tenant()
            memory[roster.allocate(tenant)] = tenant
            living.append(tenant)
        assert len(roster) == len(living)
        assert all(memory[slot] is roster[slot] for slot in range(len(roster)))
        assert {roster.slot_of(one) for one in living} == set(range(len(living)))


def test_memory_budget_is_limited() -> None:
    budget = MemoryBudget(100)
    budget.reserve(60)
    assert budget.can_reserve(40)
    assert not budget.can_reserve(41)
    with pytest.raises(AssertionError):
        budget.reserve(41)
