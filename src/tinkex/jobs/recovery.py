"""Bringing a model into memory: its newest snapshot, then everything that changed it since."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tinkex.checkpoint.manifest import check_manifest
from tinkex.engine.protocol import check_adapter_size
from tinkex.errors import CheckpointError, RequestErrorCategory, StoreError, TinkexError
from tinkex.ids import new_id
from tinkex.jobs.bench import Bench, Task
from tinkex.jobs.kinds import Kind
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
    changed_at: float = field(default_factory=time.monotonic)
    """When the oldest change happened that no snapshot covers."""
    changed_bytes: int = 0
    """Payloads that are kept because no snapshot covers them."""
    memory_bytes: int = 0
    """What it counts for in the memory budget: the most that training it takes."""
    is_untrained: bool = False
    """Whether its creation is all that happened to it, so that its seed reproduces it."""

    @property
    def num_changes(self) -> int:
        """Changes that no snapshot covers and that a snapshot is needed for."""
        return 0 if self.is_untrained else self.applied - self.saved


class Residents:
    """The models in memory.

    `make_room` is called with the memory that a model takes before it is read; it raises if there
    is none.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._by_id: OrderedDict[str, Resident] = OrderedDict()
        self.make_room: Callable[[int], None] = lambda num_bytes: None

    def __iter__(self) -> Iterator[Resident]:
        """The models, longest unused first."""
        return iter(list(self._by_id.values()))

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._by_id

    def get(self, run_id: str) -> Resident:
        """A model, brought into memory if it is not there; raises if it cannot be."""
        found = self._by_id.get(run_id)
        if found is not None:
            self._by_id.move_to_end(run_id)
            return found
        run = self._find(run_id)
        num_bytes = self._size(run)
        self.make_room(num_bytes)
        last_kind = self._restore(run)
        resident = Resident(
            run=run,
            applied=run.applied,
            saved=run.snapshot_applied,
            memory_bytes=num_bytes,
            is_untrained=run.snapshot is None and last_kind == Kind.CREATE_MODEL,
        )
        self._by_id[run_id] = resident
        return resident

    def size_of(self, run_id: str) -> int:
        """The memory that a model takes or would take; 0 if it cannot be used at all."""
        found = self._by_id.get(run_id)
        if found is not None:
            return found.memory_bytes
        try:
            return self._size(self._find(run_id))
        except (ModelGone, ModelAway):
            return 0

    def _find(self, run_id: str) -> Run:
        # In line with the writes, so that everything that is done counts.
        run = self._bench.database.write(lambda db: runs.find(db, run_id))
        if run is None:
            raise ModelGone(f"there is no model {run_id}")
        if run.state in _GONE:
            raise ModelGone(f"model {run_id} {_GONE[RunState(run.state)]}")
        return run

    def _size(self, run: Run) -> int:
        try:
            check_adapter_size(self._bench.engine, spec_of(run))
            return self._bench.engine.training_bytes(spec_of(run))
        except TinkexError as error:
            if run.applied == 0:
                # Its first operation fails for the same reason, and reports it.
                return 0
            raise ModelAway(f"model {run.id} cannot be brought back now: {error}") from error

    def drop(self, run_id: str) -> None:
        """Forget a model's memory."""
        self._by_id.pop(run_id, None)
        self._bench.engine.drop(run_id)

    def _restore(self, run: Run) -> str | None:
        """Bring a model back; returns the kind of the last operation that was replayed, if any."""
        if run.applied == 0:
            return None
        started = time.monotonic()
        try:
            last_kind = self._rebuild(run)
        except StoreError:
            # The model is not to blame: it comes back when the worker begins again.
            raise
        except Exception as error:  # noqa: BLE001 - one model must not stop the others
            self._bench.engine.drop(run.id)
            self._give_up(run, error)
        seconds, num_replayed = time.monotonic() - started, run.applied - run.snapshot_applied
        # Models that take turns in memory come back often, and nothing is replayed for them.
        level = logging.INFO if num_replayed else logging.DEBUG
        LOG.log(
            level, "%s is back: %d operations replayed in %.2f s", run.id, num_replayed, seconds
        )
        return last_kind

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

    def _rebuild(self, run: Run) -> str | None:
        engine, last_kind = self._bench.engine, None
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
                applied, last_kind = job.applied, job.kind
        return last_kind

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
