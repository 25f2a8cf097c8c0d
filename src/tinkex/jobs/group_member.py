"""This worker as a member of the groups of its store: base models, load, models and samples."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from tinkex import clock
from tinkex.engine.protocol import Engine
from tinkex.errors import StoreError
from tinkex.jobs.coordinator import MOVED_MESSAGE, move_samples
from tinkex.jobs.groups import (
    GroupView,
    Placement,
    choose_receiver,
    choose_victims,
    ready_views,
)
from tinkex.jobs.tokenizer_blobs import TokenizerPublisher
from tinkex.jobs.wakeup import WakeupSender
from tinkex.logs import get_logger
from tinkex.store import groups, jobs
from tinkex.store.coordination import group_lease
from tinkex.store.database import Connection, Database
from tinkex.store.records import GroupRecord, GroupState, JobRecord
from tinkex.store.write_locks import SHARED, lease_locks

LOG = get_logger(__name__)
#: Samples that an idle group takes from another at once.
MAX_STOLEN_SAMPLES = 16


class GroupNews(NamedTuple):
    """What a worker learns when it reports its load."""

    has_new_work: bool = False
    """Whether other groups have given it models or jobs."""
    is_draining: bool = False
    """Whether it must hand its models over and stop."""


class GroupMember:
    """The row of this worker's group, and what the worker knows of other groups."""

    def __init__(
        self,
        engine: Engine,
        database: Database,
        refresh: Callable[[], bool],
        *,
        group_id: str = "",
        source: str = "",
        check_fence: Callable[[Connection], None],
        tokenizers: TokenizerPublisher,
    ) -> None:
        """`refresh` updates the engine's base models and returns whether they changed.

        `source` identifies the settings that name the base models; `check_fence` raises if this
        worker must not write.
        """
        self.id = group_id
        self._engine = engine
        self._database = database
        self._refresh = refresh
        self._source = source
        self._check_fence = check_fence
        self._tokenizers = tokenizers
        self._is_stale = False
        self._num_moves = 0
        self._others: list[GroupView] = []
        self._own = GroupView(group_id, frozenset())
        self._wakeup = WakeupSender(database, "worker")
        self.measurements: Mapping[str, float] = {}
        """Further numbers of the reported load."""

    @property
    def can_train(self) -> bool:
        """Whether the group trains models, or only samples."""
        return self._own.can_train

    @property
    def has_peers(self) -> bool:
        """Whether the store has other groups that take work."""
        return bool(self._others)

    # --- base models ---------------------------------------------------------------------------
    def register(self, db: Connection) -> None:
        """Store the group with the base models that its engine serves."""
        before = groups.find(db, self.id)
        self._num_moves = before.num_moves if before is not None else 0
        now = clock.now()
        record = GroupRecord(
            id=self.id,
            state=GroupState.READY,
            base_models=self._describe_models(),
            models_source=self._source,
            host=socket.gethostname(),
            load={},
            num_moves=self._num_moves,
            started_at=now,
            seen_at=now,
        )
        groups.register(db, record)
        self._see(groups.list_current(db))

    def refresh_models(self) -> None:
        """Refresh the engine's base models and publish changes; retried if the store fails."""
        if self._refresh():
            self._is_stale = True
            self._tokenizers.forget()
        if self._tokenizers.publish(self._engine.base_models):
            self._is_stale = True
        if not self._is_stale:
            return
        models = self._describe_models()
        try:
            self._database.write(
                lambda db: groups.set_base_models(db, self.id, models, self._source), SHARED
            )
        except StoreError as error:
            LOG.warning("cannot publish the base models now: %s", error)
        else:
            self._is_stale = False

    def _describe_models(self) -> list[Mapping[str, object]]:
        models = self._engine.base_models()
        return [asdict(self._tokenizers.describe(model)) for model in models]

    def touch(self) -> None:
        """Record that the group is alive; called from another thread."""
        now = clock.now()
        self._database.write_soon(lambda db: groups.touch(db, self.id, now), SHARED)

    # --- load ------------------------------------------------------------------------------------
    def report(self, queued_seconds: float, busy: float) -> GroupNews:
        """Store the load, and look for new work, new peers and a request to drain.

        `busy` is the fraction of time that the engine was busy.

        The only worker of a server does not write.
        """
        is_reported = self.has_peers or bool(self.id)

        def work(db: Connection) -> list[GroupRecord]:
            if is_reported:
                num_runs = groups.count_runs_of(db, self.id)
                load = {
                    "queued_seconds": queued_seconds,
                    "num_runs": float(num_runs),
                    "busy": round(busy, 3),
                }
                load |= self.measurements
                groups.report_load(db, self.id, load, clock.now())
            return groups.list_current(db)

        # Only this worker writes the row of its group, except in exclusive transactions.
        current = self._database.write(work, SHARED) if is_reported else self._database.read(work)
        self._see(current)
        own = next((group for group in current if group.id == self.id), None)
        if own is None:
            return GroupNews()
        news = GroupNews(own.num_moves != self._num_moves, own.state == GroupState.DRAINING)
        self._num_moves = own.num_moves
        return news

    def _see(self, current: Sequence[GroupRecord]) -> None:
        views = {view.id: view for view in ready_views(current)}
        self._own = views.pop(self.id, self._own)
        self._others = list(views.values())

    # --- exchange of work ------------------------------------------------------------------------
    def choose_receiver(self, base_model: str) -> str | None:
        """Return the group that should take over a model, if this one is overloaded."""
        return choose_receiver(self._own, base_model, self._others)

    def give_run(self, run_id: str, target: str) -> None:
        """Give a model, whose state is on disk, to another group."""

        def work(db: Connection) -> None:
            self._check_fence(db)
            groups.move_runs(db, [run_id], target)

        # Exclusive: a job that is being submitted would be stored in the previous group.
        self._database.write(work)
        self._wakeup.notify([MOVED_MESSAGE])
        LOG.info("gave %s to group %r, which has less to do", run_id, target)

    def steal_samples(self) -> bool:
        """Take queued samples of an overloaded group; returns whether there were any."""
        victims = choose_victims(self._own, self._others)
        if not victims:
            return False

        def work(db: Connection) -> int:
            self._check_fence(db)
            names = self._own.base_models
            stolen = groups.list_queued_samples(db, victims[0], names, limit=MAX_STOLEN_SAMPLES)
            groups.move_samples(db, stolen, self.id)
            return len(stolen)

        # Samples that their group is starting at the same moment must not be taken.
        locks = lease_locks(group_lease(self.id), group_lease(victims[0]))
        return self._database.write(work, locks) > 0

    def place_on_trainer(self, source: str, base_model: str) -> str | None:
        """Return a group that trains and serves the base model, even if it is restarting."""
        trainers = [group for group in self._others if group.can_train]
        return Placement(trainers).place_sample(source, base_model)

    def give_samples(self, declined: Sequence[JobRecord]) -> list[JobRecord]:
        """Give samples to groups that train; returns those that no such group serves.

        Call it when the store knows that they run.
        """
        targets = {job.id: self._target_of(job) for job in declined}

        def work(db: Connection) -> None:
            self._check_fence(db)
            for job_id, target in targets.items():
                if target is not None:
                    jobs.requeue_running(db, [job_id], group_id=self.id)
                    groups.move_samples(db, [job_id], target)

        self._database.write(work, lease_locks(group_lease(self.id)))
        self._wakeup.notify([MOVED_MESSAGE])
        return [job for job in declined if targets[job.id] is None]

    def _target_of(self, job: JobRecord) -> str | None:
        base_model = job.base_model or ""
        source = groups.sample_source(job.tenant_id, job.sampler_id, base_model)
        return self.place_on_trainer(source, base_model)

    def abandon_samples(self, max_attempts: int) -> None:
        """Give all samples away, also the running ones, because the engine is gone.

        The group gets no others until its worker has restarted. Those that are on their way to it
        move when it is retired.
        """

        def work(db: Connection) -> int:
            self._check_fence(db)
            views = [view for view in ready_views(groups.list_current(db)) if view.id != self.id]
            if not views:
                return 0
            jobs.fail_exhausted(db, self.id, max_attempts=max_attempts, now=clock.now())
            groups.set_state(db, self.id, GroupState.DRAINING)
            return move_samples(db, self.id, Placement(views), prefers_sampler=True)

        num_stuck = self._database.write(work)
        self._wakeup.notify([MOVED_MESSAGE])
        LOG.warning("the engine is gone: its samples run elsewhere, %d wait for it", num_stuck)

    def hand_over(self) -> None:
        """Give all models, whose states are on disk, and all samples away, and retire the group.

        Without another group for them they stay, and the group is not retired.
        """

        def work(db: Connection) -> tuple[int, int]:
            self._check_fence(db)
            current = groups.list_current(db)
            views = [view for view in ready_views(current) if view.id != self.id]
            owned = groups.list_runs_of(db, self.id)
            placement = Placement(views)
            placed = placement.place_runs(owned)
            for target, run_ids in placed.items():
                groups.move_runs(db, run_ids, target)
            num_moved = sum(map(len, placed.values()))
            num_stuck = len(owned) - num_moved
            if views:
                num_stuck += move_samples(
                    db, self.id, placement, prefers_sampler=not self.can_train
                )
            if views and not num_stuck:
                groups.set_state(db, self.id, GroupState.RETIRED)
            return num_moved, num_stuck

        num_moved, num_stuck = self._database.write(work)
        self._wakeup.notify([MOVED_MESSAGE])
        LOG.info("drained: %d models moved, %d models or samples stay", num_moved, num_stuck)

    def close(self) -> None:
        """Close the socket."""
        self._wakeup.close()
