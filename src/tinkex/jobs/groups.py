"""Placement of models and samples on worker groups: pure decisions, the same in every process.

A model has one group at a time, because its operations are ordered. A sample may run in any group
that serves its base model; samples of one sampling session prefer the same group, whose prefix and
adapter caches they share.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from tinkex.store.records import GroupRecord, GroupState

#: A group whose queue is longer than this does not get a sample that another group could run.
OVERLOAD_SECONDS = 2.0
#: A group with a queue of this length gives a model to a group that is less busy.
REBALANCE_SECONDS = 10.0
#: How much longer the queue must be than that of the receiving group.
_REBALANCE_FACTOR = 4.0
#: Points of a group on the ring of samples; more divide the samples more evenly.
POINTS_PER_GROUP = 32
#: Load that a model is assumed to cause, although it has nothing queued now.
_RUN_SECONDS = 0.05


class GroupView(NamedTuple):
    """A group as placement sees it."""

    id: str
    base_models: frozenset[str]
    queued_seconds: float = 0.0
    """Estimated duration of its queued work."""
    num_runs: int = 0
    """Models that it owns."""

    def cost(self, num_new: int = 0) -> float:
        """Return the load with some more models: queued seconds, and a little per model."""
        return self.queued_seconds + _RUN_SECONDS * (self.num_runs + num_new)


def ready_views(groups: Iterable[GroupRecord], *, alive_since: float = 0.0) -> list[GroupView]:
    """Return the groups that take new work, sorted by id."""
    return [
        GroupView(
            group.id,
            frozenset(str(model["name"]) for model in group.base_models),
            group.load.get("queued_seconds", 0.0),
            int(group.load.get("num_runs", 0)),
        )
        for group in sorted(groups, key=lambda group: group.id)
        if group.state == GroupState.READY and group.seen_at >= alive_since
    ]


class Placement:
    """Places models and samples on groups, in constant time per decision."""

    def __init__(
        self, groups: Sequence[GroupView], num_new: Mapping[str, int] | None = None
    ) -> None:
        """`groups` are sorted by id, as `ready_views` returns them.

        `num_new` counts the models per group that were placed after the groups reported their load.
        """
        self.groups = groups
        self._num_new = dict(num_new or {})
        self._by_model: dict[str, list[GroupView]] = {}
        self._rings: dict[str, list[tuple[int, GroupView]]] = {}

    def place_run(self, run_id: str, base_model: str) -> str | None:
        """Return the group of a new model: the less loaded of two that its id selects.

        So processes with an outdated view of the load do not all choose the same group.
        """
        serving = self._serving(base_model)
        if not serving:
            return None
        target = _choose_of_two(run_id, serving, self._num_new).id
        self._num_new[target] = self._num_new.get(target, 0) + 1
        return target

    def place_runs(self, base_models: Mapping[str, str]) -> dict[str, list[str]]:
        """Distribute models, given as base model by id, and return the ids per group.

        Models whose base model no group serves are omitted.
        """
        placed: dict[str, list[str]] = {}
        for run_id, base_model in base_models.items():
            target = self.place_run(run_id, base_model)
            if target is not None:
                placed.setdefault(target, []).append(run_id)
        return placed

    def place_sample(self, source: str, base_model: str) -> str | None:
        """Return the group of a sample: the first on the ring of its source without a long queue.

        Consistent hashing: a group that leaves changes only the placement of its own sources.
        """
        ring = self._ring(base_model)
        if not ring:
            return None
        start = bisect(ring, _hash(source), key=lambda point: point[0]) % len(ring)
        for index in range(start, start + len(ring)):
            group = ring[index % len(ring)][1]
            if group.queued_seconds < OVERLOAD_SECONDS:
                return group.id
        # All are busy; the first one has the caches.
        return ring[start][1].id

    def _serving(self, base_model: str) -> list[GroupView]:
        if base_model not in self._by_model:
            self._by_model[base_model] = [
                group for group in self.groups if base_model in group.base_models
            ]
        return self._by_model[base_model]

    def _ring(self, base_model: str) -> list[tuple[int, GroupView]]:
        if base_model not in self._rings:
            by_id = {group.id: group for group in self._serving(base_model)}
            self._rings[base_model] = [(point, by_id[name]) for point, name in _points(*by_id)]
        return self._rings[base_model]


def _choose_of_two(
    run_id: str, serving: Sequence[GroupView], num_new: Mapping[str, int]
) -> GroupView:
    """Return the less loaded of two groups; `num_new` counts models placed since the report."""
    if len(serving) == 1:
        return serving[0]
    number = _hash(run_id)
    first = number % len(serving)
    second = (number >> 32) % (len(serving) - 1)
    one, two = serving[first], serving[second + (second >= first)]
    is_first_better = one.cost(num_new.get(one.id, 0)) <= two.cost(num_new.get(two.id, 0))
    return one if is_first_better else two


@lru_cache(maxsize=16)
def _points(*group_ids: str) -> list[tuple[int, str]]:
    """Return the points of groups on the ring, sorted by hash."""
    return sorted(
        (_hash(f"{group_id}#{number}"), group_id)
        for group_id in group_ids
        for number in range(POINTS_PER_GROUP)
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def choose_receiver(own: GroupView, base_model: str, others: Sequence[GroupView]) -> str | None:
    """Return the group that should take over a model of an overloaded group, if there is one."""
    if own.queued_seconds < REBALANCE_SECONDS:
        return None
    serving = [group for group in others if base_model in group.base_models]
    least = min(serving, key=GroupView.cost, default=None)
    if least is None or least.queued_seconds * _REBALANCE_FACTOR > own.queued_seconds:
        return None
    return least.id


def choose_victims(own: GroupView, others: Sequence[GroupView]) -> list[str]:
    """Return the groups from which an idle group takes queued samples, the busiest first."""
    busy = [
        group
        for group in others
        if group.queued_seconds > OVERLOAD_SECONDS and group.base_models & own.base_models
    ]
    return [group.id for group in sorted(busy, key=lambda group: -group.queued_seconds)]
