"""This worker as a member of the groups of its store: base models, load, and exchange of work."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from tinkex import clock
from tinkex.engine.protocol import Engine
from tinkex.errors import StoreError
from tinkex.jobs.coordinator import MOVED_MESSAGE, move_samples
from tinkex.jobs.fair_queue import FairQueue
from tinkex.jobs.groups import (
    GroupView,
    Placement,
    choose_receiver,
    choose_victims,
    ready_views,
)
from tinkex.jobs.lease import group_lease
from tinkex.jobs.resident_models import ResidentModels
from tinkex.jobs.result_log import ResultLog
from tinkex.jobs.snapshots import AdapterMemory
from tinkex.jobs.wakeup import WakeupSender
from tinkex.logs import get_logger
from tinkex.store import groups
from tinkex.store.database import Connection, Database
from tinkex.store.records import GroupRecord, GroupState
from tinkex.store.write_locks import SHARED, lease_locks

LOG = get_logger(__name__)
#: Interval of load reports while there are other groups, and of looking for others.
REPORT_SECONDS = 1.0
ALONE_SECONDS = 5.0
#: Samples that an idle group takes from another at once.
MAX_STOLEN_SAMPLES = 16
#: Assumed speed of a worker that has not measured its own.
FIRST_TOKENS_PER_SECOND = 1000.0
_EMA_WEIGHT = 0.3


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
        self._is_stale = False
        self._num_moves = 0
        self._others: list[GroupView] = []
        self._own = GroupView(group_id, frozenset())
        self._wakeup = WakeupSender(database, "worker")

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
        self._is_stale = self._refresh() or self._is_stale
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
        return [asdict(model) for model in self._engine.base_models()]

    def touch(self) -> None:
        """Record that the group is alive; called from another thread."""
        now = clock.now()
        self._database.write_soon(lambda db: groups.touch(db, self.id, now), SHARED)

    # --- load ------------------------------------------------------------------------------------
    def report(self, queued_seconds: float) -> GroupNews:
        """Store the load, and look for new work, new peers and a request to drain.

        The only worker of a server does not write.
        """
        is_reported = self.has_peers or bool(self.id)

        def work(db: Connection) -> list[GroupRecord]:
            if is_reported:
                num_runs = groups.count_runs_of(db, self.id)
                load = {"queued_seconds": queued_seconds, "num_runs": float(num_runs)}
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
            num_stuck += move_samples(db, self.id, placement) if views else 0
            if views and not num_stuck:
                groups.set_state(db, self.id, GroupState.RETIRED)
            return num_moved, num_stuck

        num_moved, num_stuck = self._database.write(work)
        self._wakeup.notify([MOVED_MESSAGE])
        LOG.info("drained: %d models moved, %d models or samples stay", num_moved, num_stuck)

    def close(self) -> None:
        """Close the socket."""
        self._wakeup.close()


class ThroughputMeter:
    """Measures the tokens per second of a busy worker, as a running mean."""

    def __init__(self) -> None:
        self._tokens_per_second = FIRST_TOKENS_PER_SECOND
        self._is_measured = False
        self._num_tokens = 0
        self._busy_seconds = 0.0

    def add(self, num_tokens: int, busy_seconds: float) -> None:
        """Count finished tokens and the time that the engine was busy."""
        self._num_tokens += num_tokens
        self._busy_seconds += busy_seconds
        if self._busy_seconds >= REPORT_SECONDS and self._num_tokens:
            rate = self._num_tokens / self._busy_seconds
            weight = _EMA_WEIGHT if self._is_measured else 1.0
            self._tokens_per_second += weight * (rate - self._tokens_per_second)
            self._num_tokens, self._busy_seconds, self._is_measured = 0, 0.0, True

    def seconds_for(self, num_tokens: int) -> float:
        """Estimate how long this many tokens take."""
        return num_tokens / max(self._tokens_per_second, 1.0)


class WorkExchange:
    """Exchanges work with other groups: reports the load, takes samples, gives models away."""

    def __init__(
        self,
        member: GroupMember,
        fair_queue: FairQueue,
        resident_models: ResidentModels,
        adapter_memory: AdapterMemory,
        result_log: ResultLog,
    ) -> None:
        self.throughput = ThroughputMeter()
        self._member = member
        self._fair_queue = fair_queue
        self._resident_models = resident_models
        self._adapter_memory = adapter_memory
        self._result_log = result_log
        self._next_at = 0.0

    def is_due(self) -> bool:
        """Return whether it is time for `run`."""
        return time.monotonic() >= self._next_at

    def expedite(self) -> None:
        """Make `run` due, because other groups have given work to this one."""
        self._next_at = 0.0

    def run(self) -> GroupNews:
        """Report the load, give a model away if the group is overloaded, and return the news."""
        seconds = REPORT_SECONDS if self._member.has_peers else ALONE_SECONDS
        self._next_at = time.monotonic() + seconds
        num_tokens = self._fair_queue.num_queued_tokens()
        news = self._member.report(self.throughput.seconds_for(num_tokens))
        if self._member.has_peers and not news.is_draining and self._fair_queue.num_lanes > 1:
            self._give_model_away()
        return news

    def _give_model_away(self) -> None:
        """Give one waiting model to a group that has much less to do."""
        for resident in self._resident_models:
            run = resident.run
            is_waiting = self._fair_queue.has_lane(run.tenant_id, run.id)
            if not is_waiting or self._fair_queue.is_busy(run):
                continue
            receiver = self._member.choose_receiver(run.base_model)
            if receiver is None or not self._adapter_memory.evict(run.id):
                return
            self._result_log.flush()
            self._member.give_run(run.id, receiver)
            self._fair_queue.remove_model(run)
            return
