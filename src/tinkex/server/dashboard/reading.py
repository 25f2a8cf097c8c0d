"""What the pages show, read from the store for one tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinkex import types
from tinkex.jobs.bells import ALIVE_SECONDS
from tinkex.jobs.kinds import Kind
from tinkex.server.base_models import served_models
from tinkex.server.call import Identity
from tinkex.server.dashboard.memory import PageMemory, Progress
from tinkex.server.dashboard.progress import (
    History,
    Update,
    continued,
    tokens_per_second,
    without_before,
)
from tinkex.server.ownership import run_of
from tinkex.store import checkpoints, overview, processes, runs, searching, steps
from tinkex.store.database import Connection
from tinkex.store.records import Checkpoint, Run, Session
from tinkex.store.searching import SessionFacts

MAX_RUNS = 25
MAX_CHECKPOINTS = 15
MAX_SESSIONS = 10
#: Steps from which a run's row is made: the latest update and the speed need no more.
_ROW_STEPS = 48
#: Steps from which a run's own page is made.
_PAGE_STEPS = 20_000
#: Updates in a run's table.
_TABLE_UPDATES = 20
#: A run that moved within this time is shown as moving.
_MOVING_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A model in training, as a line of a table."""

    run: Run
    name: str | None
    """What its user calls it."""
    progress: Progress
    active_at: float
    is_moving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What is promised and not kept yet, and who would keep it."""

    work: Sequence[overview.OpenWork]
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
class Overview:
    """The first page."""

    runs: Sequence[RunRow]
    num_runs: int
    queue: Queue
    checkpoints: Sequence[Checkpoint]
    num_checkpoints: int
    sessions: Sequence[SessionFacts]
    base_models: Sequence[str]
    """Names of those that can be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """The page of one model."""

    row: RunRow
    rank: int | None
    history: History
    updates: Sequence[tuple[int, Update]]
    """The latest with their places, newest first."""
    checkpoints: Sequence[Checkpoint]


class Reader:
    """Reads what one tenant's pages show, at one moment."""

    def __init__(self, db: Connection, memory: PageMemory, tenant_id: str, now: float) -> None:
        self._db = db
        self._memory = memory
        self._tenant_id = tenant_id
        self._now = now

    def overview(self) -> Overview:
        """Everything about the tenant at a glance."""
        db, tenant_id, now = self._db, self._tenant_id, self._now
        found, num_runs = runs.page(db, tenant_id, limit=MAX_RUNS, offset=0)
        saved, num_saved = checkpoints.page(db, tenant_id, limit=MAX_CHECKPOINTS, offset=0, now=now)
        asked = types.SessionSearchRequest(limit=MAX_SESSIONS)
        owner = Identity(tenant_id=tenant_id, key_id=0).urn
        return Overview(
            runs=self._rows(found),
            num_runs=num_runs,
            queue=self._queue(),
            checkpoints=saved,
            num_checkpoints=num_saved,
            sessions=searching.search(db, tenant_id, owner, asked).sessions,
            base_models=[model.name for model in served_models(db) if model.is_trainable],
        )

    def run(self, run_id: str) -> RunPage:
        """Everything about one of the tenant's models; NotFoundError if it is not there."""
        run = run_of(self._db, self._tenant_id, run_id, "run")
        history = self._history(run_id)
        progress = Progress(
            num_updates=len(history.updates),
            loss=history.loss,
            speed=tokens_per_second(history.recent),
            finished_at=history.finished_at,
        )
        names = overview.session_names(self._db, [run.session_id])
        rank = run.spec.get("rank")
        return RunPage(
            row=self._row(run, names, progress),
            rank=rank if isinstance(rank, int) else None,
            history=history,
            updates=_latest(history),
            checkpoints=checkpoints.of_run(self._db, run_id, self._now),
        )

    def _queue(self) -> Queue:
        alive = processes.alive(self._db, "worker", since=self._now - ALIVE_SECONDS)
        work = overview.open_work(self._db, self._tenant_id)
        return Queue(work=work, num_workers=len(alive))

    def _rows(self, found: Sequence[Run]) -> list[RunRow]:
        known = {run.id: self._memory.progress.get((run.id, run.applied)) for run in found}
        changed = [run for run in found if known[run.id] is None]
        totals = overview.count_steps(self._db, [run.id for run in changed], Kind.OPTIM_STEP)
        names = overview.session_names(self._db, {run.session_id for run in found})
        rows = []
        for run in found:
            progress = known[run.id] or self._progress(run, totals.get(run.id, 0))
            rows.append(self._row(run, names, progress))
        return rows

    def _progress(self, run: Run, num_updates: int) -> Progress:
        latest = continued(History(), steps.of_run(self._db, run.id, limit=_ROW_STEPS))
        progress = Progress(
            num_updates=num_updates,
            loss=latest.loss,
            speed=tokens_per_second(latest.recent),
            finished_at=latest.finished_at,
        )
        self._memory.progress.put((run.id, run.applied), progress)
        return progress

    def _history(self, run_id: str) -> History:
        """The steps of a model; those that were read before are not read again."""
        known = self._memory.histories.get(run_id) or History()
        new = steps.of_run(self._db, run_id, limit=_PAGE_STEPS, after_no=known.last_no)
        oldest_no = overview.oldest_step(self._db, run_id)
        history = without_before(continued(known, new), oldest_no or 0)
        self._memory.histories.put(run_id, history)
        return history

    def _row(self, run: Run, names: Mapping[str, str], progress: Progress) -> RunRow:
        active_at = max(run.used_at, progress.finished_at)
        return RunRow(
            run=run,
            name=_name(run, names),
            progress=progress,
            active_at=active_at,
            is_moving=self._now - active_at < _MOVING_SECONDS,
        )


def _name(run: Run, names: Mapping[str, str]) -> str | None:
    named = (run.user_metadata or {}).get("name")
    return named if isinstance(named, str) and named.strip() else names.get(run.session_id)


def _latest(history: History) -> list[tuple[int, Update]]:
    num_updates = len(history.updates)
    first = max(num_updates - _TABLE_UPDATES, 0)
    return list(enumerate(history.updates[first:], first + 1))[::-1]


def status_of(session: Session) -> types.RunSessionStatus:
    """Where a session is in its life, in one word."""
    if session.finished_at is not None:
        return "finished"
    return "lost" if session.expired_at is not None else "active"
