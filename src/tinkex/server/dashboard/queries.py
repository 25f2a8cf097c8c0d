"""What pages found out and need not find out again; several threads look at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from tinkex import types
from tinkex.headline_metrics import select_headlines
from tinkex.jobs.quotas import QuotaChecks, QuotaUse
from tinkex.jobs.wakeup import ALIVE_SECONDS
from tinkex.server.http.model_specs import list_served_models
from tinkex.server.http.ownership import require_run
from tinkex.server.http.request_context import CallerIdentity
from tinkex.server.http.run_history import (
    OptimizerUpdate,
    RunHistory,
    drop_before,
    extend_history,
    tokens_per_second,
)
from tinkex.server.http.run_summaries import RunSummary, summarize_runs
from tinkex.store import checkpoints, coordination, runs, stats, steps
from tinkex.store import sessions as sessions_module
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, RunRecord
from tinkex.store.sessions import SessionWithStorage

K = TypeVar("K")
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """A bounded memory; what was not used for longest makes room."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """What is kept for a key."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep something."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)


@dataclass(frozen=True, slots=True)
class PageCache:
    """What one API process keeps for its pages; nothing is lost with it."""

    histories: LRUCache[str, RunHistory] = field(default_factory=lambda: LRUCache(32))
    """By run, for the pages of single runs: reading thousands of steps takes long."""


MAX_RUNS = 25
MAX_CHECKPOINTS = 15
MAX_SESSIONS = 10
#: Steps from which the speed of a run is read.
_NUM_ROW_STEPS = 48
#: Steps from which a run's own page is made.
_NUM_PAGE_STEPS = 20_000
#: Updates in a run's table.
_NUM_TABLE_UPDATES = 20
#: Clients report metrics of a step up to this long after it, so steps are read again until then.
_REPORT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A model in training, as a line of a table."""

    summary: RunSummary
    speed: float | None

    @property
    def run(self) -> RunRecord:
        """The model itself."""
        return self.summary.run


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSummary:
    """What is promised and not kept yet, and who would keep it."""

    work: Sequence[stats.OpenJobs]
    num_workers: int

    @property
    def num_waiting(self) -> int:
        """Promises that nobody has taken."""
        return sum(line.num_waiting for line in self.work)

    @property
    def num_running(self) -> int:
        """Promises that are being kept."""
        return sum(line.num_running for line in self.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewPage:
    """The first page."""

    runs: Sequence[RunRow]
    num_runs: int
    queue: QueueSummary
    checkpoints: Sequence[CheckpointRecord]
    num_checkpoints: int
    sessions: Sequence[SessionWithStorage]
    base_models: Sequence[str]
    """Names of those that can be trained."""
    quotas: Sequence[QuotaUse]
    """Those that have a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """The page of one model."""

    row: RunRow
    rank: int | None
    history: RunHistory
    updates: Sequence[tuple[int, OptimizerUpdate]]
    """The latest with their places, newest first."""
    checkpoints: Sequence[CheckpointRecord]

    @property
    def metric_names(self) -> list[str]:
        """The metrics in its table of updates."""
        told = (name for _, update in self.updates for name in update.metrics)
        return list(select_headlines({"loss": 0.0} | dict.fromkeys(told, 0.0)))


class DashboardReader:
    """Reads what one tenant's pages show, at one moment."""

    def __init__(
        self,
        db: Connection,
        cache: PageCache,
        tenant_id: str,
        now: float,
        quotas: QuotaChecks,
    ) -> None:
        self._quotas = quotas
        self._db = db
        self._memory = cache
        self._tenant_id = tenant_id
        self._now = now

    def overview(self) -> OverviewPage:
        """Everything about the tenant at a glance."""
        db, tenant_id, now = self._db, self._tenant_id, self._now
        found, num_runs = runs.list_page(db, tenant_id, limit=MAX_RUNS, offset=0)
        saved, num_saved = checkpoints.list_page(
            db, tenant_id, limit=MAX_CHECKPOINTS, offset=0, now=now
        )
        asked = types.SessionSearchRequest(limit=MAX_SESSIONS)
        owner = CallerIdentity(tenant_id=tenant_id, key_id=0).urn
        return OverviewPage(
            runs=self._rows(found),
            num_runs=num_runs,
            queue=self._queue(),
            checkpoints=saved,
            num_checkpoints=num_saved,
            sessions=sessions_module.search(db, tenant_id, owner, asked).sessions,
            base_models=[model.name for model in list_served_models(db) if model.is_trainable],
            quotas=[use for use in self._quotas.list_usage(db, tenant_id, now) if use.limit],
        )

    def run(self, run_id: str) -> RunPage:
        """Everything about one of the tenant's models; NotFoundError if it is not there."""
        run = require_run(self._db, self._tenant_id, run_id, "run")
        history = self._history(run)
        summary = summarize_runs(self._db, [run], self._now)[0]
        rank = run.spec.get("rank")
        return RunPage(
            row=RunRow(summary=summary, speed=tokens_per_second(history.recent)),
            rank=rank if isinstance(rank, int) else None,
            history=history,
            updates=_latest_updates(history),
            checkpoints=checkpoints.list_by_run(self._db, run_id, self._now),
        )

    def _queue(self) -> QueueSummary:
        alive = coordination.list_alive_processes(
            self._db, "worker", since=self._now - ALIVE_SECONDS
        )
        work = stats.open_jobs_by_kind(self._db, self._tenant_id)
        return QueueSummary(work=work, num_workers=len(alive))

    def _rows(self, found: Sequence[RunRecord]) -> list[RunRow]:
        summaries = summarize_runs(self._db, found, self._now)
        return [RunRow(summary=each, speed=self._speed(each.run.id)) for each in summaries]

    def _speed(self, run_id: str) -> float | None:
        latest = extend_history(
            RunHistory(), steps.list_by_run(self._db, run_id, limit=_NUM_ROW_STEPS)
        )
        return tokens_per_second(latest.recent)

    def _history(self, run: RunRecord) -> RunHistory:
        """The steps of a model; those that cannot change any more are not read again."""
        known = self._memory.histories.get(run.id) or RunHistory()
        new = steps.list_by_run(self._db, run.id, limit=_NUM_PAGE_STEPS, after_no=known.last_no)
        oldest_no = stats.oldest_step_no(self._db, run.id) or 0
        since = self._now - _REPORT_SECONDS
        num_settled = next(
            (place for place, (_, step) in enumerate(new) if step.finished_at >= since), len(new)
        )
        settled = drop_before(extend_history(known, new[:num_settled]), oldest_no)
        self._memory.histories.put(run.id, settled)
        history = extend_history(settled, new[num_settled:])
        return replace(history, num_dropped=max(run.num_steps - len(history.updates), 0))


def _latest_updates(history: RunHistory) -> list[tuple[int, OptimizerUpdate]]:
    return list(history.numbered_updates())[: -_NUM_TABLE_UPDATES - 1 : -1]
