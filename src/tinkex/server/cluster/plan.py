"""Decisions of the cluster controller: how many groups a pool needs, and what to start and end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from tinkex.store.records import GroupState

#: Queued work per group that is wanted at most.
QUEUE_SECONDS = 10.0
#: Start groups after this time with too few, and end one after this time with too many.
SCALE_UP_SECONDS = 15.0
SCALE_DOWN_SECONDS = 300.0
#: A pool whose groups are busy for less than this fraction of the time has too many.
LOW_BUSY_FRACTION = 0.4
#: How long a replacement may wait for resources before an outdated group makes room for it.
SURGE_SECONDS = 60.0
#: A group that cannot start is tried again after this time.
RETRY_SECONDS = 30.0
#: A group that is lost, because its actor does not respond and its worker does not report to the
#: store, is placed anew after this time; so is one that waits for resources.
LOST_SECONDS = 30.0
WAITING_SECONDS = 180.0


class PoolSize(NamedTuple):
    """How many groups a pool may have."""

    smallest: int
    largest: int

    def clamp(self, number: int) -> int:
        """Return the nearest number within the limits."""
        return max(self.smallest, min(number, self.largest))


class Scaling(NamedTuple):
    """The wanted number of groups of a pool, and since when it is too small or too large."""

    num_wanted: int
    too_few_since: float | None = None
    too_many_since: float | None = None


def scale(
    state: Scaling, size: PoolSize, *, queued_seconds: float, busy: float, now: float
) -> Scaling:
    """Return the next state; `busy` is the mean fraction of time that the groups compute."""
    num_wanted = size.clamp(state.num_wanted)
    demand = size.clamp(math.ceil(queued_seconds / QUEUE_SECONDS))
    if demand > num_wanted:
        since = now if state.too_few_since is None else state.too_few_since
        if now - since >= SCALE_UP_SECONDS:
            return Scaling(demand)
        return Scaling(num_wanted, too_few_since=since)
    if demand < num_wanted and busy < LOW_BUSY_FRACTION:
        since = now if state.too_many_since is None else state.too_many_since
        if now - since >= SCALE_DOWN_SECONDS:
            return Scaling(num_wanted - 1, too_many_since=now)
        return Scaling(num_wanted, too_many_since=since)
    return Scaling(num_wanted)


class GroupFacts(NamedTuple):
    """A group as the store and the cluster know it."""

    id: str
    is_started: bool = True
    """Whether the cluster has it; its resources may not be available yet."""
    is_current: bool = True
    """Whether it was started with the settings of now."""
    state: GroupState | None = None
    """Its state in the store; None before its worker has registered."""
    has_ended: bool = False
    """Whether its worker was stopped, drained or replaced."""
    failed_seconds: float | None = None
    """How long its worker has been unable to start."""
    waiting_seconds: float = 0.0
    """How long it has waited for resources."""
    lost_seconds: float = 0.0
    """How long it has had resources, but neither its actor nor its worker was heard of."""
    queued_seconds: float = 0.0
    num_runs: int = 0
    base_models: frozenset[str] = frozenset()

    @property
    def is_active(self) -> bool:
        """Whether it runs, starts or will be tried again, and keeps its work."""
        is_leaving = self.state in {GroupState.DRAINING, GroupState.RETIRED}
        has_left = self.has_ended and self.failed_seconds is None
        return self.is_started and not is_leaving and not has_left

    @property
    def is_ready(self) -> bool:
        """Whether it takes work."""
        is_running = self.is_active and self.failed_seconds is None
        return is_running and self.state == GroupState.READY


class ActionKind(StrEnum):
    """What the controller can do."""

    START = "start"  #: a new group, without an id
    RESTORE = "restore"  #: a group that the cluster has lost, with its models
    DRAIN = "drain"  #: hand its models over, then it ends
    STOP = "stop"  #: end it and keep its models for later
    REMOVE = "remove"  #: free its resources


class Action(NamedTuple):
    """A step of the controller."""

    kind: ActionKind
    group_id: str = ""


def plan_stop(groups: Sequence[GroupFacts]) -> list[Action]:
    """End all groups of a pool; their models stay with them until they are started again."""
    return [
        Action(ActionKind.REMOVE if group.has_ended else ActionKind.STOP, group.id)
        for group in groups
        if group.is_started
    ]


def plan_pool(
    groups: Sequence[GroupFacts], num_wanted: int, served_elsewhere: frozenset[str] = frozenset()
) -> list[Action]:
    """Return what to do so that a pool has the wanted number of groups with current settings.

    `served_elsewhere` are the base models of ready groups of other pools.
    """
    actions = [Action(ActionKind.REMOVE, group.id) for group in groups if _is_over(group)]
    active = [group for group in groups if group.is_active]
    num_missing = num_wanted - len(active)
    lost = [
        group
        for group in groups
        if not group.is_started and group.state in {GroupState.READY, GroupState.DRAINING}
    ]
    restored = sorted(lost, key=lambda group: -group.num_runs)[: max(0, num_missing)]
    actions += [Action(ActionKind.RESTORE, group.id) for group in restored]
    actions += [Action(ActionKind.START)] * (num_missing - len(restored))
    if num_missing > 0 or any(group.state == GroupState.DRAINING for group in groups):
        return actions
    outdated = [group for group in active if not group.is_current]
    if outdated and num_wanted:
        return actions + _plan_replacement(active, outdated, num_wanted)
    if len(active) > num_wanted:
        actions += _drain_least_used(active, active, served_elsewhere)
    return actions


def _is_over(group: GroupFacts) -> bool:
    if not group.is_started:
        return False
    if group.failed_seconds is not None:
        return group.failed_seconds >= RETRY_SECONDS
    if group.lost_seconds >= LOST_SECONDS or group.waiting_seconds >= WAITING_SECONDS:
        # Ray may have forgotten a group that it was starting when its head was lost.
        return True
    return group.has_ended or group.state == GroupState.RETIRED


def _plan_replacement(
    active: Sequence[GroupFacts], outdated: Sequence[GroupFacts], num_wanted: int
) -> list[Action]:
    """Start one group more than wanted, and drain an outdated one once it is ready."""
    if len(active) <= num_wanted:
        return [Action(ActionKind.START)]
    others = [group for group in active if group.is_current]
    is_stuck = any(group.waiting_seconds >= SURGE_SECONDS for group in others)
    num_ready = sum(group.is_ready for group in active)
    if all(group.is_ready for group in others) or (is_stuck and num_ready > 1):
        return _drain_least_used(outdated, active)
    return []


def _drain_least_used(
    candidates: Sequence[GroupFacts],
    active: Sequence[GroupFacts],
    served_elsewhere: frozenset[str] = frozenset(),
) -> list[Action]:
    """Drain one group, but never the only one that serves a base model."""

    def is_replaceable(group: GroupFacts) -> bool:
        others = [each.base_models for each in active if each.is_ready and each.id != group.id]
        return bool(others or served_elsewhere) and group.base_models <= served_elsewhere.union(
            *others
        )

    replaceable = [group for group in candidates if is_replaceable(group)]
    by_use = sorted(replaceable, key=lambda group: (group.queued_seconds, group.num_runs, group.id))
    return [Action(ActionKind.DRAIN, group.id) for group in by_use[:1]]
