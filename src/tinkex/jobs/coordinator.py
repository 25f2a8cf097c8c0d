"""Coordination of the groups of a store: give the work of a group that is gone to other groups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from tinkex import clock
from tinkex.jobs.groups import Placement, can_train, ready_views
from tinkex.jobs.lease import LeaseWatch
from tinkex.jobs.wakeup import WakeupSender
from tinkex.logs import get_logger
from tinkex.store import coordination, groups, jobs
from tinkex.store.coordination import LeaseState, group_lease
from tinkex.store.database import Connection, Database
from tinkex.store.records import GroupRecord, GroupState

LOG = get_logger(__name__)
#: Wake-up message to workers whose group was given models or jobs.
MOVED_MESSAGE = "moved"


class GroupCoordinator:
    """Retires groups whose lease is not renewed; one worker of a store runs it at a time."""

    def __init__(
        self,
        database: Database,
        *,
        move_after_seconds: float = 30.0,
        max_attempts: int = 3,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._move_after_seconds = move_after_seconds
        self._max_attempts = max_attempts
        self._monotonic = monotonic
        self._watches: dict[str, LeaseWatch] = {}
        self._observed_at = -math.inf
        self._wakeup = WakeupSender(database, "worker")

    def run_once(self) -> None:
        """Retire groups that are gone and move their work."""
        current = self._database.read(groups.list_current)
        if len(current) < 2:
            # The work of a single group stays until it returns.
            self._watches.clear()
            return
        expired = self._find_expired(current)
        alive = [group for group in current if group.id not in expired]
        placement = Placement(ready_views(alive))
        has_moved = False
        for group in current:
            if group.id in expired and placement.groups:
                retire = partial(
                    self._retire, group=group, expired=expired[group.id], placement=placement
                )
                has_moved = self._database.write(retire) or has_moved
        if self._database.read(groups.list_strays):
            has_moved = self._database.write(_return_strays) or has_moved
        if has_moved:
            self._wakeup.notify([MOVED_MESSAGE])

    def close(self) -> None:
        """Close the socket."""
        self._wakeup.close()

    def _find_expired(self, current: Sequence[GroupRecord]) -> dict[str, LeaseState]:
        """Return the groups whose lease has not been renewed for long, with its state."""
        ids = [group.id for group in current]
        states = self._database.read(
            lambda db: {name: coordination.find_lease(db, group_lease(name)) for name in ids}
        )
        now = self._monotonic()
        if now - self._observed_at > self._move_after_seconds / 2:
            # The store was unreachable, so no group could renew its lease meanwhile.
            self._watches.clear()
        self._observed_at = now
        watches, expired = {}, {}
        for group_id, state in states.items():
            watch = self._watches.get(group_id) or LeaseWatch(self._move_after_seconds)
            # A group that never had a lease has not started yet, or was registered by a migration.
            watch.observe(state or LeaseState(0, 0.0), now)
            watches[group_id] = watch
            unchanged = watch.expired_state(now)
            if unchanged is not None:
                expired[group_id] = unchanged
        self._watches = watches
        return expired

    def _retire(
        self, db: Connection, group: GroupRecord, expired: LeaseState, placement: Placement
    ) -> bool:
        """Move a group's models and samples; returns False if the group is alive after all."""
        if expired.epoch and not coordination.revoke_lease(db, group_lease(group.id), expired):
            return False
        jobs.fail_exhausted(db, group.id, max_attempts=self._max_attempts, now=clock.now())
        owned = groups.list_runs_of(db, group.id)
        placed = placement.place_runs(owned)
        for target, run_ids in placed.items():
            groups.move_runs(db, run_ids, target)
        num_stuck = (
            len(owned)
            - sum(map(len, placed.values()))
            + move_samples(db, group.id, placement, prefers_sampler=not can_train(group))
        )
        if not num_stuck:
            groups.set_state(db, group.id, GroupState.RETIRED)
        LOG.warning(
            "group %r is gone: moved %d models to other groups, %d models or samples must wait",
            group.id,
            len(owned),
            num_stuck,
        )
        return True


def move_samples(
    db: Connection, group_id: str, placement: Placement, *, prefers_sampler: bool = False
) -> int:
    """Give a group's samples to other groups; returns how many no other group can run.

    `prefers_sampler` prefers groups that cannot train.
    """
    by_target: dict[str, list[str]] = {}
    num_stuck = 0
    for sample in groups.list_open_samples(db, group_id):
        # Jobs without a base model can run anywhere.
        target = (
            placement.groups[0].id
            if sample.base_model is None
            else placement.place_sample(
                sample.source, sample.base_model, prefers_sampler=prefers_sampler
            )
        )
        if target is None:
            num_stuck += 1
        else:
            by_target.setdefault(target, []).append(sample.id)
    for target, job_ids in by_target.items():
        groups.move_samples(db, job_ids, target)
    return num_stuck


def _return_strays(db: Connection) -> bool:
    strays = groups.list_strays(db)
    for run_id, group_id in strays:
        groups.move_runs(db, [run_id], group_id)
    return bool(strays)
