"""The cluster controller: compares the groups of the store with those on Ray, and acts.

All it knows is read anew from both, so it may be killed and started anywhere at any time.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec

from tinkex import clock
from tinkex.errors import ConfigError
from tinkex.ids import new_id
from tinkex.jobs.coordinator import MOVED_MESSAGE
from tinkex.jobs.wakeup import ALIVE_SECONDS, WakeupSender
from tinkex.logs import get_logger
from tinkex.server.cluster.hosted_worker import WorkerStatus
from tinkex.server.cluster.plan import (
    Action,
    ActionKind,
    GroupFacts,
    PoolSize,
    Scaling,
    plan_pool,
    plan_stop,
    scale,
)
from tinkex.server.cluster.views import ClusterNode, PlacedGroup
from tinkex.server.config import ServerConfig
from tinkex.server.config_sources import encode_config
from tinkex.server.pools import PoolConfig, make_group_id, pool_of_group
from tinkex.settings import package_version
from tinkex.store import clusters, groups
from tinkex.store.clusters import ClusterReport, ClusterTarget, GroupReport, NodeReport, PoolReport
from tinkex.store.database import Connection, Database
from tinkex.store.records import GroupRecord, GroupState

LOG = get_logger(__name__)
#: The report is written when it changes, and at least at this interval.
REPORT_SECONDS = 5.0
#: Interval of attempts to start the processes of a group that has none.
COMPLETE_SECONDS = 10.0


class Cluster(Protocol):
    """What the controller needs of a cluster."""

    def list_nodes(self) -> list[ClusterNode]: ...
    def list_groups(self) -> list[PlacedGroup]: ...
    def statuses(self, group_ids: Sequence[str]) -> dict[str, WorkerStatus | None]: ...
    def start(self, group_id: str, digest: str, pool: PoolConfig, config: bytes) -> None: ...
    def stop(self, group_id: str) -> None: ...
    def remove(self, group: PlacedGroup) -> None: ...


def group_config(config: ServerConfig, pool: PoolConfig) -> ServerConfig:
    """Return the settings of the worker of a pool's group."""
    return replace(
        config,
        cluster="",
        pools=(),
        max_workers=0,
        workers=1,
        api_key="",
        ranks=pool.ranks,
        gradient_shards=config.shards_per_model,
        models=pool.models or config.models,
        threads=config.threads or max(1, int(pool.resources.get("CPU", 1))),
    )


def settings_digest(config: bytes, pool: PoolConfig) -> str:
    """Identify what a group is started with; groups with another digest are replaced."""
    started = msgspec.structs.replace(pool, min=1, max=1)
    content = msgspec.json.encode([package_version(), config.decode(), started])
    return hashlib.sha256(content).hexdigest()[:12]


class ClusterController:
    """Keeps the groups of all pools running."""

    def __init__(
        self,
        config: ServerConfig,
        database: Database,
        cluster: Cluster,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._database = database
        self._cluster = cluster
        self._monotonic = monotonic
        self._wakeup = WakeupSender(database, "worker")
        self._scalings: dict[str, Scaling] = {}
        self._waiting_since: dict[str, float] = {}
        self._lost_since: dict[str, float] = {}
        self._failed_since: dict[str, float] = {}
        self._completed_at: dict[str, float] = {}
        self._was_ready = False
        self._reported: ClusterReport | None = None
        self._pools = {
            pool.name: (pool, encode_config(group_config(config, pool)))
            for pool in config.worker_pools
        }

    def run_once(self) -> None:
        """Start, drain and remove groups as needed, and report the state of the cluster.

        Raises ConfigError if no group could ever start.
        """
        placed = {group.id: group for group in self._cluster.list_groups()}
        statuses = self._cluster.statuses(list(placed))
        records, target = self._database.read(partial(_read_store, group_ids=list(placed)))
        by_pool = self._facts(placed, statuses, records)
        for name, facts in by_pool.items():
            for action in self._plan(name, facts, target, records):
                self._act(action, name, placed, statuses)
        if target.is_up:
            self._complete(placed, statuses)
        self._report(placed, statuses, target)
        self._check_start(statuses, records)

    def close(self) -> None:
        """Close the socket."""
        self._wakeup.close()

    # --- facts -----------------------------------------------------------------------------------
    def _facts(
        self,
        placed: Mapping[str, PlacedGroup],
        statuses: Mapping[str, WorkerStatus | None],
        records: Mapping[str, GroupRecord],
    ) -> dict[str, list[GroupFacts]]:
        """Return the groups by pool; groups of pools that are not configured any more are last."""
        ids = sorted({*placed, *(group_id for group_id in records if pool_of_group(group_id))})
        by_pool: dict[str, list[GroupFacts]] = {name: [] for name in self._pools}
        for group_id in ids:
            facts = self._group_facts(
                group_id, placed.get(group_id), statuses.get(group_id), records.get(group_id)
            )
            by_pool.setdefault(pool_of_group(group_id) or "", []).append(facts)
        return by_pool

    def _group_facts(
        self,
        group_id: str,
        placed: PlacedGroup | None,
        status: WorkerStatus | None,
        record: GroupRecord | None,
    ) -> GroupFacts:
        load = record.load if record is not None else {}
        is_waiting = placed is not None and not placed.is_placed
        is_lost = (
            placed is not None and placed.is_placed and status is None and not _is_alive(record)
        )
        has_failed = status is not None and bool(status.error)
        failed_seconds = self._seconds_since(self._failed_since, group_id, has_failed)
        return GroupFacts(
            group_id,
            is_started=placed is not None,
            is_current=placed is None or placed.digest == self._digest(group_id),
            state=GroupState(record.state) if record is not None else None,
            has_ended=status is not None and status.has_ended,
            failed_seconds=failed_seconds if has_failed else None,
            waiting_seconds=self._seconds_since(self._waiting_since, group_id, is_waiting),
            lost_seconds=self._seconds_since(self._lost_since, group_id, is_lost),
            queued_seconds=load.get("queued_seconds", 0.0),
            num_runs=int(load.get("num_runs", 0)),
            base_models=frozenset(
                str(model["name"]) for model in (record.base_models if record else ())
            ),
        )

    def _digest(self, group_id: str) -> str:
        pool, config = self._pools.get(pool_of_group(group_id) or "", (None, b""))
        return settings_digest(config, pool) if pool is not None else ""

    def _seconds_since(self, starts: dict[str, float], group_id: str, is_so: bool) -> float:
        """Return for how long something has been so."""
        if not is_so:
            starts.pop(group_id, None)
            return 0.0
        return self._monotonic() - starts.setdefault(group_id, self._monotonic())

    # --- plan ------------------------------------------------------------------------------------
    def _plan(
        self,
        name: str,
        facts: Sequence[GroupFacts],
        target: ClusterTarget,
        records: Mapping[str, GroupRecord],
    ) -> list[Action]:
        if name not in self._pools:
            elsewhere = frozenset(
                str(model["name"])
                for group_id, record in records.items()
                for model in record.base_models
                if pool_of_group(group_id) in self._pools and record.state == GroupState.READY
            )
            return plan_pool([group for group in facts if group.is_started], 0, elsewhere)
        if not target.is_up:
            return plan_stop(facts)
        size = self._size(name, target)
        active = [records[group.id] for group in facts if group.is_ready]
        busy = [record.load.get("busy", 0.0) for record in active]
        before = self._scalings.get(name) or Scaling(sum(group.is_active for group in facts))
        scaling = scale(
            before,
            size,
            queued_seconds=sum(record.load.get("queued_seconds", 0.0) for record in active),
            busy=sum(busy) / len(busy) if busy else 1.0,
            now=self._monotonic(),
        )
        if scaling.num_wanted != before.num_wanted:
            LOG.info("pool %r needs %d groups now", name, scaling.num_wanted)
        self._scalings[name] = scaling
        return plan_pool(facts, scaling.num_wanted)

    def _size(self, name: str, target: ClusterTarget) -> PoolSize:
        pool = self._pools[name][0]
        return PoolSize(*target.pools.get(name, (pool.min, pool.largest)))

    # --- actions ---------------------------------------------------------------------------------
    def _act(
        self,
        action: Action,
        pool_name: str,
        placed: Mapping[str, PlacedGroup],
        statuses: Mapping[str, WorkerStatus | None],
    ) -> None:
        group_id = action.group_id or make_group_id(pool_name, new_id()[:8])
        if action.kind in {ActionKind.START, ActionKind.RESTORE}:
            LOG.info("starting group %r", group_id)
            self._start(group_id)
        elif action.kind == ActionKind.DRAIN:
            LOG.info("draining group %r", group_id)
            self._database.write(lambda db: groups.set_state(db, group_id, GroupState.DRAINING))
            self._wakeup.notify([MOVED_MESSAGE])
        elif action.kind == ActionKind.STOP:
            LOG.info("stopping group %r", group_id)
            self._cluster.stop(group_id)
        else:
            LOG.info("removing group %r%s", group_id, _reason(placed[group_id], statuses))
            self._cluster.remove(placed[group_id])
            self._completed_at[group_id] = self._monotonic()

    def _start(self, group_id: str) -> None:
        pool, config = self._pools[pool_of_group(group_id) or ""]
        self._cluster.start(group_id, settings_digest(config, pool), pool, config)

    def _complete(
        self, placed: Mapping[str, PlacedGroup], statuses: Mapping[str, WorkerStatus | None]
    ) -> None:
        """Start the processes of groups that have resources only: a controller was interrupted."""
        now = self._monotonic()
        for group_id, group in placed.items():
            is_due = now - self._completed_at.get(group_id, -math.inf) >= COMPLETE_SECONDS
            if group_id in statuses or not is_due:
                continue
            self._completed_at[group_id] = now
            if group.digest == self._digest(group_id):
                self._start(group_id)
            else:
                self._cluster.remove(group)

    def _check_start(
        self, statuses: Mapping[str, WorkerStatus | None], records: Mapping[str, GroupRecord]
    ) -> None:
        self._was_ready = self._was_ready or bool(records)
        errors = [status.error for status in statuses.values() if status and status.error]
        if errors and not self._was_ready:
            raise ConfigError(
                f"no worker can start on the Ray cluster: {errors[0]}",
                hint="The logs of Ray on the node give the reason.",
            )

    # --- report ----------------------------------------------------------------------------------
    def _report(
        self,
        placed: Mapping[str, PlacedGroup],
        statuses: Mapping[str, WorkerStatus | None],
        target: ClusterTarget,
    ) -> None:
        report = ClusterReport(
            at=clock.now(),
            address=self._config.ray_address,
            nodes=tuple(
                NodeReport(
                    id=node.id,
                    host=node.host,
                    address=node.address,
                    is_alive=node.is_alive,
                    resources=node.resources,
                    groups=tuple(sorted(g.id for g in placed.values() if node.id in g.node_ids)),
                )
                for node in self._cluster.list_nodes()
            ),
            groups=tuple(_group_report(group, statuses.get(group.id)) for group in placed.values()),
            pools=tuple(self._pool_report(name, target) for name in self._pools),
        )
        before = self._reported
        is_recent = before is not None and report.at - before.at < REPORT_SECONDS
        if before and is_recent and msgspec.structs.replace(before, at=report.at) == report:
            return
        self._database.write(lambda db: clusters.write_report(db, report))
        self._reported = report

    def _pool_report(self, name: str, target: ClusterTarget) -> PoolReport:
        size = self._size(name, target)
        scaling = self._scalings.get(name)
        is_scaled = target.is_up and scaling is not None
        return PoolReport(
            name=name,
            min=size.smallest,
            max=size.largest,
            num_wanted=scaling.num_wanted if is_scaled and scaling else 0,
        )


def _is_alive(record: GroupRecord | None) -> bool:
    """Return whether the worker of a group reports to the store."""
    return record is not None and record.seen_at >= clock.now() - ALIVE_SECONDS


def _reason(group: PlacedGroup, statuses: Mapping[str, WorkerStatus | None]) -> str:
    """Return why a group is removed, for the log; empty if it has ended as it should."""
    if not group.is_placed:
        return ": it has waited for resources for too long"
    status = statuses.get(group.id)
    if status is None:
        return ": it does not respond"
    return f": {status.error}" if status.error else ""


def _group_report(group: PlacedGroup, status: WorkerStatus | None) -> GroupReport:
    return GroupReport(
        id=group.id,
        pool=pool_of_group(group.id) or "",
        node=group.node_ids[0] if group.is_placed and group.node_ids else "",
        pid=status.pid if status is not None else 0,
        error=status.error if status is not None else "",
    )


def _read_store(
    db: Connection, group_ids: Sequence[str]
) -> tuple[dict[str, GroupRecord], ClusterTarget]:
    """Return the current groups, also the retired ones of these ids, and the target."""
    records = {group.id: group for group in groups.list_current(db)}
    for group_id in group_ids:
        record = None if group_id in records else groups.find(db, group_id)
        if record is not None:
            records[group_id] = record
    return records, clusters.read_target(db)
