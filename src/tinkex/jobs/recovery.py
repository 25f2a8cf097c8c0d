"""Bringing a model into memory: its newest snapshot, then everything that changed it since."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tinkex.checkpoint.manifest import check_manifest
from tinkex.errors import CheckpointError, RequestErrorCategory, StoreError, TinkexError
from tinkex.ids import new_id
from tinkex.jobs.bench import Bench, Task
from tinkex.jobs.operations import replay
from tinkex.jobs.training import spec_of
from tinkex.logs import get_logger
from tinkex.store import jobs, runs
from tinkex.store.records import Job, Run, RunState

LOG = get_logger(__name__)
#: Payloads that are in memory at once during a replay.
MAX_READ = 8


class StateLost(TinkexError):
    """A model's state on disk is damaged."""

    category = RequestErrorCategory.Server


class ModelAway(TinkexError):
    """A model cannot be brought into memory now, though nothing of it is lost."""

    category = RequestErrorCategory.Server


class ModelGone(TinkexError):
    """There is no such model to work on."""

    category = RequestErrorCategory.User


_GONE = {
    RunState.FAILED: "could not be made",
    RunState.UNLOADED: "was unloaded",
    RunState.CORRUPTED: "has lost its state; make a new one from your last checkpoint",
}


@dataclass(slots=True)
class Resident:
    """A model in the engine's memory, and how far it is from its snapshot."""

    run: Run
    applied: int
    """How many operations changed it so far."""
    saved: int
    """How many of them its newest snapshot covers, or the one that is being written."""
    changed_at: float = field(default_factory=time.time)
    """When the oldest change happened that no snapshot covers."""
    changed_bytes: int = 0
    """Payloads that are kept because no snapshot covers them."""

    @property
    def num_changes(self) -> int:
        """Changes that no snapshot covers."""
        return self.applied - self.saved


class Residents:
    """The models in memory."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._by_id: dict[str, Resident] = {}

    def __iter__(self) -> Iterator[Resident]:
        return iter(list(self._by_id.values()))

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._by_id

    def get(self, run_id: str) -> Resident:
        """A model, brought into memory if it is not there; raises if it cannot be."""
        found = self._by_id.get(run_id)
        if found is not None:
            return found
        # In line with the writes, so that everything that is done counts.
        run = self._bench.database.write(lambda db: runs.find(db, run_id))
        if run is None:
            raise ModelGone(f"there is no model {run_id}")
        if run.state in _GONE:
            raise ModelGone(f"model {run_id} {_GONE[RunState(run.state)]}")
        self._restore(run)
        resident = Resident(run=run, applied=run.applied, saved=run.snapshot_applied)
        self._by_id[run_id] = resident
        return resident

    def drop(self, run_id: str) -> None:
        """Forget a model's memory."""
        self._by_id.pop(run_id, None)
        self._bench.engine.drop(run_id)

    def _restore(self, run: Run) -> None:
        if run.applied == 0:
            return
        started = time.monotonic()
        try:
            num_replayed = self._rebuild(run)
        except StoreError:
            # The model is not to blame: it comes back when the worker begins again.
            raise
        except Exception as error:  # noqa: BLE001 - one model must not stop the others
            self._bench.engine.drop(run.id)
            self._give_up(run, error)
        seconds = time.monotonic() - started
        LOG.info("%s is back: %d operations replayed in %.2f s", run.id, num_replayed, seconds)

    def _give_up(self, run: Run, error: Exception) -> NoReturn:
        if not _is_damage(error):
            LOG.error("%s cannot be brought back now", run.id, exc_info=error)
            raise ModelAway(f"model {run.id} cannot be brought back now: {error}") from error
        LOG.error("the state of %s is lost: %s", run.id, error)
        self._bench.database.write(lambda db: runs.set_state(db, run.id, RunState.CORRUPTED))
        raise StateLost(
            f"the state of model {run.id} is damaged ({error}); make a new one from your last "
            "checkpoint"
        ) from error

    def _rebuild(self, run: Run) -> int:
        engine = self._bench.engine
        engine.drop(run.id)
        if run.snapshot is not None:
            directory = self._bench.home.snapshots / run.snapshot
            check_manifest(directory)
            engine.restore(run.id, spec_of(run), directory)
        applied = run.snapshot_applied
        while applied < run.applied:
            for job, payload in self._changes(run.id, applied):
                if job.applied != applied + 1:
                    raise StateLost(f"operation {applied + 1} of {run.applied} is missing")
                replay(self._bench, Task(job, run, payload))
                applied = job.applied
        return run.applied - run.snapshot_applied

    def _changes(self, run_id: str, applied: int) -> list[tuple[Job, bytes]]:
        found = self._bench.database.read(
            lambda db: jobs.changes_after(db, run_id, applied, limit=MAX_READ)
        )
        if not found:
            raise StateLost(f"operation {applied + 1} is missing")
        return found


def _is_damage(error: Exception) -> bool:
    """Whether a state can never be read again; a disk or an engine may only be in trouble now."""
    if isinstance(error, StateLost):
        return True
    cause = error.__cause__
    is_trouble = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, CheckpointError) and not is_trouble


def snapshot_directory(snapshots: Path, run_id: str, applied: int) -> Path:
    """A place for a model's state after so many changes, which nothing else has ever had."""
    return snapshots / f"{run_id.replace(':', '_')}-{applied}-{new_id()[:8]}"
