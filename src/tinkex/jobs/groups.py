"""Placement of models and samples on worker groups: pure decisions, the same in every process.

A model has one group at a time, because its operations are ordered. A sample may run in any group
that serves its base model; samples of one sampling session prefer the same group, whose prefix and
adapter caches they share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tinkex.store.records import GroupRecord, GroupState

#: A group whose queue is longer than this does not get a sample that another group could run.
OVERLOAD_SECONDS = 2.0
#: A group with a queue of this length gives a model to a group that is less busy.
REBALANCE_SECONDS = 10.0
#: How much longer the queue must be than that of the receiving group.
_REBALANCE_FACTOR = 4.0
#: Load that a model which was placed since the last report is assumed to cause.
_NEW_RUN_SECONDS = 0.05


class GroupView(NamedTuple):
    """A group as placement sees it."""

    id: str
    base_models: frozenset[str]
    queued_seconds: float = 0.0
    """Estimated duration of its queued work."""
    num_runs: int = 0
    """Models that it owns."""

    @property
    def cost(self) -> tuple[float, int]:
        """Sorts the less loaded group first; models count if the queues are about equal."""
        return round(self.queued_seconds, 1), self.num_runs


def ready_views(groups: Iterable[GroupRecord], *, alive_since: float = 0.0) -> list[GroupView]:
    """Return the groups that take new work."""
    return [
        GroupView(
            group.id,
            frozenset(str(model["name"]) for model in group.base_models),
            group.load.get("queued_seconds", 0.0),
            int(group.load.get("num_runs", 0)),
        )
        for group in groups
        if group.state == GroupState.READY and group.seen_at >= alive_since
    ]


def place_run(run_id: str, base_model: str, groups: Sequence[GroupView]) -> str | None:
    """Return the group of a new model: the less loaded of two that its id selects.

    Processes with an outdated view of the load do not all choose the same group, and a retry makes
    the same choice.
    """
    serving = [group for group in groups if base_model in group.base_models]
    if not serving:
        return None
    two = sorted(serving, key=lambda group: _weight(run_id, group.id))[:2]
    return min(two, key=lambda group: group.cost).id


def place_sample(source: str, base_model: str, groups: Sequence[GroupView]) -> str | None:
    """Return the group of a sample: the first in the order of its source without a long queue.

    The order is a rendezvous hash, so that a group that leaves changes only its own sources.
    """
    serving = [group for group in groups if base_model in group.base_models]
    if not serving:
        return None
    order = sorted(serving, key=lambda group: _weight(source, group.id))
    free = (group for group in order if group.queued_seconds < OVERLOAD_SECONDS)
    return next(free, order[0]).id


def place_all(base_models: Mapping[str, str], groups: Sequence[GroupView]) -> dict[str, list[str]]:
    """Distribute models, given as base model by id, and return the ids per group.

    Models whose base model no group serves are omitted.
    """
    views = {group.id: group for group in groups}
    placed: dict[str, list[str]] = {}
    for run_id, base_model in base_models.items():
        target = place_run(run_id, base_model, list(views.values()))
        if target is None:
            continue
        placed.setdefault(target, []).append(run_id)
        view = views[target]
        views[target] = view._replace(
            num_runs=view.num_runs + 1, queued_seconds=view.queued_seconds + _NEW_RUN_SECONDS
        )
    return placed


def choose_receiver(own: GroupView, base_model: str, others: Sequence[GroupView]) -> str | None:
    """Return the group that should take over a model of an overloaded group, if there is one."""
    if own.queued_seconds < REBALANCE_SECONDS:
        return None
    serving = [group for group in others if base_model in group.base_models]
    least = min(serving, key=lambda group: group.cost, default=None)
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


def _weight(key: str, group_id: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{group_id}".encode(), digest_size=8).digest()
