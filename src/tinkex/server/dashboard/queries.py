"""Store queries of the dashboard pages, and a cache of run histories."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from tinkex import types
from tinkex.display import select_headlines
from tinkex.errors import NotFoundError
from tinkex.jobs.job_types import JobKind
from tinkex.jobs.quotas import QuotaChecks, QuotaUse
from tinkex.jobs.wakeup import ALIVE_SECONDS
from tinkex.server.config import DEFAULT_TENANT
from tinkex.server.dashboard.curves import RunCurves, drop_steps_before, extend_curves
from tinkex.server.http.model_specs import list_served_models
from tinkex.server.http.ownership import require_run
from tinkex.server.http.request_context import CallerIdentity
from tinkex.server.http.run_history import (
    NumberedStep,
    OptimizerUpdate,
    RunHistory,
    drop_before,
    extend_history,
    tokens_per_second,
)
from tinkex.server.http.run_summaries import RunSummary, own_tags, summarize_runs
from tinkex.server.http.serializers import stringify_metadata
from tinkex.store import (
    checkpoints,
    clusters,
    coordination,
    groups,
    keys,
    runs,
    sessions,
    stats,
    steps,
)
from tinkex.store.clusters import ClusterReport
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, GroupRecord, RunRecord
from tinkex.store.sessions import SessionWithStorage

K = TypeVar("K")
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """A thread-safe cache that evicts the least recently used entry; entries do not expire."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return a cached value, or None."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Cache a value."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)


@dataclass(frozen=True, slots=True)
class PageCache:
    """The page cache of one API process; it can be dropped at any time."""

    histories: LRUCache[str, RunHistory] = field(default_factory=lambda: LRUCache(32))
    """Histories by run id: reading thousands of steps takes long."""
    curves: LRUCache[str, RunCurves] = field(default_factory=lambda: LRUCache(16))
    """Curves by run id."""


MAX_RUNS = 50
DEFAULT_SORT = "-created"
#: Pages of the list of runs.
MAX_PAGES = 1000
MAX_SEARCH_CHARS = 120
#: Settings and metadata of a run that are shown.
MAX_CONFIG = 60
MAX_CHECKPOINTS = 15
#: Checkpoints and other runs of the session on the page of a run.
MAX_RUN_CHECKPOINTS, MAX_SIBLINGS = 200, 20
MAX_SESSIONS = 10
#: Number of step records from which the overview measures the speed of a run.
_NUM_ROW_STEPS = 48
#: Maximum number of step records on a run's page.
_NUM_PAGE_STEPS = 20_000
#: Optimizer steps in the table of a run's page.
_NUM_TABLE_UPDATES = 20
#: Clients may report metrics of a step this long after it; younger steps are not cached.
_REPORT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run as a row of the overview table."""

    summary: RunSummary
    speed: float | None

    @property
    def run(self) -> RunRecord:
        """The run's record."""
        return self.summary.run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFilter:
    """Which runs a page lists, from its query."""

    search: str = ""
    sort: str = DEFAULT_SORT
    page: int = 1

    @property
    def is_default(self) -> bool:
        """Whether the newest runs are listed without a search."""
        return self == RunsFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSummary:
    """Unfinished jobs by kind, and the number of live workers."""

    work: Sequence[stats.OpenJobs]
    num_workers: int

    @property
    def num_waiting(self) -> int:
        """Number of jobs waiting for the worker."""
        return sum(line.num_waiting for line in self.work)

    @property
    def num_running(self) -> int:
        """Number of running jobs."""
        return sum(line.num_running for line in self.work)


NO_FILTER = RunsFilter()


def parse_filter(query: Mapping[str, str]) -> RunsFilter:
    """Read a filter from the query of a page; what is not valid is ignored."""
    sort, page = query.get("sort", ""), query.get("page", "")
    is_page = page.isascii() and page.isdigit() and len(page) < 5
    return RunsFilter(
        search=query.get("q", "").strip()[:MAX_SEARCH_CHARS],
        sort=sort if sort.removeprefix("-") in runs.SORT_COLUMNS else DEFAULT_SORT,
        page=min(max(int(page), 1), MAX_PAGES) if is_page else 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewPage:
    """The data of the overview page."""

    runs: Sequence[RunRow]
    num_runs: int
    """Runs that match the search."""
    filter: RunsFilter
    queue: QueueSummary
    checkpoints: Sequence[CheckpointRecord]
    num_checkpoints: int
    sessions: Sequence[SessionWithStorage]
    base_models: Sequence[str]
    """Names of the trainable base models."""
    quotas: Sequence[QuotaUse]
    """Quotas that have a limit."""
    runs_per_page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """The data of a run's page."""

    row: RunRow
    rank: int | None
    history: RunHistory
    updates: Sequence[tuple[int, OptimizerUpdate]]
    """The latest optimizer steps with their numbers, newest first."""
    checkpoints: Sequence[CheckpointRecord]
    config: Mapping[str, str]
    """Settings and metadata of the run, by name."""
    own_tags: Sequence[str]
    """Tags without those of the session."""
    sibling_runs: Sequence[str]
    """Ids of other runs of the session."""

    @property
    def num_open(self) -> int:
        """Number of unfinished operations of the run."""
        workload = self.row.summary.workload
        return workload.num_queued + workload.num_running

    @property
    def metric_names(self) -> list[str]:
        """The metrics in the table of steps."""
        reported = (name for _, update in self.updates for name in update.metrics)
        return list(select_headlines({"loss": 0.0} | dict.fromkeys(reported, 0.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A worker group as a row of the cluster page."""

    group: GroupRecord
    num_models: int
    state: str
    node: str
    """Where a cluster has placed it; its host otherwise."""
    num_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPage:
    """The data of the cluster page."""

    groups: Sequence[GroupRow]
    stats: stats.StoreStats
    report: ClusterReport | None
    """What the controller of a Ray cluster reports; None without one."""


class DashboardReader:
    """Reads the data of one tenant's pages within one transaction."""

    def __init__(
        self,
        db: Connection,
        cache: PageCache,
        tenant_id: str,
        now: float,
        quotas: QuotaChecks,
    ) -> None:
        self.quotas = quotas
        self.db = db
        self._cache = cache
        self.tenant_id = tenant_id
        self.now = now

    def overview(self, wanted: RunsFilter = NO_FILTER) -> OverviewPage:
        """Read the overview of the tenant."""
        db, tenant_id, now = self.db, self.tenant_id, self.now
        run_records, num_runs = runs.list_page(
            db,
            tenant_id,
            limit=MAX_RUNS,
            offset=(wanted.page - 1) * MAX_RUNS,
            search=wanted.search or None,
            sort=wanted.sort,
        )
        checkpoint_records, num_checkpoints = checkpoints.list_page(
            db, tenant_id, limit=MAX_CHECKPOINTS, offset=0, now=now
        )
        search = types.SessionSearchRequest(limit=MAX_SESSIONS)
        owner = CallerIdentity(tenant_id=tenant_id, key_id=0).urn
        return OverviewPage(
            runs=self._rows(run_records),
            num_runs=num_runs,
            filter=wanted,
            queue=self._queue(),
            checkpoints=checkpoint_records,
            num_checkpoints=num_checkpoints,
            sessions=sessions.search(db, tenant_id, owner, search).sessions,
            base_models=[model.name for model in list_served_models(db) if model.is_trainable],
            quotas=[use for use in self.quotas.list_usage(db, tenant_id, now) if use.limit],
            runs_per_page=MAX_RUNS,
        )

    def run(self, run_id: str) -> RunPage:
        """Read one of the tenant's runs; raises NotFoundError if it does not exist."""
        run = require_run(self.db, self.tenant_id, run_id, "run")
        history = self._history(run)
        summary = summarize_runs(self.db, [run], self.now)[0]
        rank = run.spec.get("rank")
        return RunPage(
            row=RunRow(summary=summary, speed=tokens_per_second(history.recent)),
            rank=rank if isinstance(rank, int) else None,
            history=history,
            updates=_latest_updates(history),
            checkpoints=checkpoints.list_by_run(self.db, run_id, self.now)[:MAX_RUN_CHECKPOINTS],
            config=describe_config(run),
            own_tags=own_tags(run),
            sibling_runs=[
                other.id
                for other in runs.list_by_session(self.db, run.session_id)[:MAX_SIBLINGS]
                if other.id != run.id
            ],
        )

    def cluster(self) -> ClusterPage:
        """Read the worker groups of the server and the nodes of its cluster."""
        db, alive_since = self.db, self.now - ALIVE_SECONDS
        tenant = keys.find_tenant(db, self.tenant_id)
        if tenant is None or tenant.name != DEFAULT_TENANT:
            raise NotFoundError("only the default tenant of a server can see its workers")
        report = clusters.read_report(db)
        nodes = {group.id: group.node[:12] for group in report.groups} if report else {}
        statistics = stats.collect_stats(db, alive_since=alive_since)
        return ClusterPage(
            groups=[
                GroupRow(
                    group=group,
                    num_models=groups.count_runs_of(db, group.id),
                    state=group.state if group.seen_at >= alive_since else "lost",
                    node=nodes.get(group.id) or group.host,
                    num_restarts=int(statistics.num_restarts.get(group.id, 0)),
                )
                for group in groups.list_current(db)
            ],
            stats=statistics,
            report=report,
        )

    def has_cluster(self) -> bool:
        """Whether the server has several worker groups or runs on a cluster."""
        return len(groups.list_current(self.db)) > 1 or clusters.read_report(self.db) is not None

    def curves(self, run_id: str) -> RunCurves:
        """Read the curves of one of the tenant's runs; settled steps come from the cache."""
        run = require_run(self.db, self.tenant_id, run_id, "run")
        cached = self._cache.curves.get(run.id) or RunCurves()
        rows = steps.list_by_run(self.db, run.id, limit=_NUM_PAGE_STEPS, after_no=cached.last_no)
        num_settled = self._count_settled(rows)
        num_later = sum(1 for _, row in rows[num_settled:] if row.kind == JobKind.OPTIM_STEP)
        settled = extend_curves(cached, rows[:num_settled], run.num_steps - num_later)
        num_stored = steps.count_after(self.db, run.id, JobKind.OPTIM_STEP, 0)
        settled = drop_steps_before(settled, run.num_steps - num_stored + 1)
        self._cache.curves.put(run.id, settled)
        # Passes whose optimizer step is not settled belong to it.
        unsettled = [(no, row) for no, row in rows if no > settled.last_no]
        return extend_curves(settled, unsettled, run.num_steps)

    def _count_settled(self, rows: Sequence[NumberedStep]) -> int:
        """How many of these step records cannot change any more."""
        since = self.now - _REPORT_SECONDS
        return next(
            (index for index, (_, step) in enumerate(rows) if step.finished_at >= since), len(rows)
        )

    def _queue(self) -> QueueSummary:
        alive = coordination.list_alive_processes(self.db, "worker", since=self.now - ALIVE_SECONDS)
        work = stats.open_jobs_by_kind(self.db, self.tenant_id)
        return QueueSummary(work=work, num_workers=len(alive))

    def _rows(self, records: Sequence[RunRecord]) -> list[RunRow]:
        summaries = summarize_runs(self.db, records, self.now)
        return [RunRow(summary=each, speed=self._speed(each.run.id)) for each in summaries]

    def _speed(self, run_id: str) -> float | None:
        latest = extend_history(
            RunHistory(), steps.list_by_run(self.db, run_id, limit=_NUM_ROW_STEPS)
        )
        return tokens_per_second(latest.recent)

    def _history(self, run: RunRecord) -> RunHistory:
        """The steps of a run; steps that cannot change any more come from the cache."""
        cached = self._cache.histories.get(run.id) or RunHistory()
        new = steps.list_by_run(self.db, run.id, limit=_NUM_PAGE_STEPS, after_no=cached.last_no)
        oldest_no = stats.oldest_step_no(self.db, run.id) or 0
        num_settled = self._count_settled(new)
        settled = drop_before(extend_history(cached, new[:num_settled]), oldest_no)
        self._cache.histories.put(run.id, settled)
        history = extend_history(settled, new[num_settled:])
        return replace(history, num_dropped=max(run.num_steps - len(history.updates), 0))


def describe_config(run: RunRecord) -> dict[str, str]:
    """The settings and the metadata of a run; its name and tags are shown elsewhere."""
    metadata = run.user_metadata or {}
    shown = {key: value for key, value in metadata.items() if key not in {"name", "tags"}}
    settings = {key.replace("_", " "): value for key, value in run.spec.items()}
    texts = stringify_metadata({"base model": run.base_model, **settings, **shown}) or {}
    return dict(list(texts.items())[:MAX_CONFIG])


def _latest_updates(history: RunHistory) -> list[tuple[int, OptimizerUpdate]]:
    return list(history.numbered_updates())[: -_NUM_TABLE_UPDATES - 1 : -1]
