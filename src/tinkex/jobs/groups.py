"""Placement of models and samples on worker groups: pure decisions, the same in every process.

A model has one group at a time, because its operations are ordered. A sample may run in any group
that serves its base model; samples of one sampling session prefer the same group, whose prefix and
adapter caches they share. Groups that cannot train, such as those of vLLM, get the samples that
prefer them, and those that no other group serves.
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
    can_train: bool = True
    """Whether it trains models; otherwise it only samples."""

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
            can_train(group),
        )
        for group in sorted(groups, key=lambda group: group.id)
        if group.state == GroupState.READY and group.seen_at >= alive_since
    ]


def can_train(group: GroupRecord) -> bool:
    """Return whether a group trains models."""
    return not group.base_models or any(
        model.get("is_trainable", True) for model in group.base_models
    )


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
        self._by_model: dict[tuple[str, bool], list[GroupView]] = {}
        self._rings: dict[tuple[str, bool], list[tuple[int, GroupView]]] = {}

    def place_run(self, run_id: str, base_model: str) -> str | None:
        """Return the group of a new model: the less loaded of two that its id selects.

        So processes with an outdated view of the load do not all choose the same group.
        """
        serving = self._serving(base_model, can_train=True)
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

    def place_sample(
        self, source: str, base_model: str, *, prefers_sampler: bool = False
    ) -> str | None:
        """Return the group of a sample: the first on the ring of its source without a long queue.

        Consistent hashing: a group that leaves changes only the placement of its own sources.
        `prefers_sampler` prefers groups that cannot train; otherwise they come last.
        """
        ring = self._ring(base_model, can_train=not prefers_sampler)
        ring = ring or self._ring(base_model, can_train=prefers_sampler)
        if not ring:
            return None
        start = bisect(ring, _hash(source), key=lambda point: point[0]) % len(ring)
        for index in range(start, start + len(ring)):
            group = ring[index % len(ring)][1]
            if group.queued_seconds < OVERLOAD_SECONDS:
                return group.id
        # All are busy; the first one has the caches.
        return ring[start][1].id

    def has_sampler(self, base_model: str) -> bool:
        """Return whether a group that cannot train serves the base model."""
        return bool(self._serving(base_model, can_train=False))

    def _serving(self, base_model: str, *, can_train: bool) -> list[GroupView]:
        key = base_model, can_train
        if key not in self._by_model:
            self._by_model[key] = [
                group
                for group in self.groups
                if base_model in group.base_models and group.can_train == can_train
            ]
        return self._by_model[key]

    def _ring(self, base_model: str, *, can_train: bool) -> list[tuple[int, GroupView]]:
        key = base_model, can_train
        if key not in self._rings:
            by_id = {group.id: group for group in self._serving(base_model, can_train=can_train)}
            self._rings[key] = [(point, by_id[name]) for point, name in _points(*by_id)]
        return self._rings[key]


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
    serving = [group for group in others if base_model in group.base_models and group.can_train]
    least = min(serving, key=GroupView.cost, default=None)
    if least is None or least.queued_seconds * _REBALANCE_FACTOR > own.queued_seconds:
        return None
    return least.id


def choose_victims(own: GroupView, others: Sequence[GroupView]) -> list[str]:
    """Return the groups from which an idle group takes queued samples, the busiest first.

    A group that cannot train takes none of those that can: samples may be there for a reason.
    """
    busy = [
        group
        for group in others
        if group.queued_seconds > OVERLOAD_SECONDS
        and group.base_models & own.base_models
        and (own.can_train or not group.can_train)
    ]
    return [group.id for group in sorted(busy, key=lambda group: -group.queued_seconds)]
