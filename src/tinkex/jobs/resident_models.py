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
from tinkex.jobs.job_types import JobKind
from tinkex.jobs.operations import adapter_spec, replay
from tinkex.jobs.worker_context import ModelTask, WorkerContext
from tinkex.logs import get_logger
from tinkex.store import jobs, runs
from tinkex.store.records import JobRecord, RunRecord, RunState

LOG = get_logger(__name__)
#: Payloads that are in memory at once during a replay.
MAX_REPLAY_PAYLOADS = 8


class ModelStateCorrupted(TinkexError):
    """A model's state on disk is damaged."""

    category = RequestErrorCategory.Server


class ModelUnavailable(TinkexError):
    """A model cannot be brought into memory now, though nothing of it is lost."""

    category = RequestErrorCategory.Server


class ModelDeleted(TinkexError):
    """There is no such model to work on."""

    category = RequestErrorCategory.User


_UNUSABLE_STATES = {
    RunState.FAILED: "could not be made",
    RunState.UNLOADED: "was unloaded",
    RunState.CORRUPTED: "has lost its state; make a new one from your last checkpoint",
}


@dataclass(slots=True)
class ResidentModel:
    """A model in the engine's memory, and how far it is from its snapshot."""

    run: RunRecord
    applied: int
    """How many operations changed it so far."""
    snapshot_applied: int
    """How many of them its newest snapshot covers, or the one that is being written."""
    changed_at: float = field(default_factory=time.monotonic)
    """When the oldest change happened that no snapshot covers."""
    changed_bytes: int = 0
    """Payloads that are kept because no snapshot covers them."""
    memory_bytes: int = 0
    """What it counts for in the memory budget: the most that training it takes."""
    is_freshly_created: bool = False
    """Whether its creation is all that happened to it, so that its seed reproduces it."""

    @property
    def num_changes(self) -> int:
        """Changes that no snapshot covers and that a snapshot is needed for."""
        return 0 if self.is_freshly_created else self.applied - self.snapshot_applied


class ResidentModels:
    """The models in memory.

    `make_room` is called with the memory that a model takes before it is read; it raises if there
    is none.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._by_id: OrderedDict[str, ResidentModel] = OrderedDict()
        self.free_memory: Callable[[int], None] = lambda num_bytes: None

    def __iter__(self) -> Iterator[ResidentModel]:
        """The models, longest unused first."""
        return iter(list(self._by_id.values()))

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._by_id

    def get(self, run_id: str) -> ResidentModel:
        """A model, brought into memory if it is not there; raises if it cannot be."""
        found = self._by_id.get(run_id)
        if found is not None:
            self._by_id.move_to_end(run_id)
            return found
        run = self._find_usable_run(run_id)
        num_bytes = self._required_bytes(run)
        self.free_memory(num_bytes)
        last_kind = self._restore(run)
        resident = ResidentModel(
            run=run,
            applied=run.applied,
            snapshot_applied=run.snapshot_applied,
            memory_bytes=num_bytes,
            is_freshly_created=run.snapshot is None and last_kind == JobKind.CREATE_MODEL,
        )
        self._by_id[run_id] = resident
        return resident

    def memory_bytes_of(self, run_id: str) -> int:
        """The memory that a model takes or would take; 0 if it cannot be used at all."""
        found = self._by_id.get(run_id)
        if found is not None:
            return found.memory_bytes
        try:
            return self._required_bytes(self._find_usable_run(run_id))
        except (ModelDeleted, ModelUnavailable):
            return 0

    def _find_usable_run(self, run_id: str) -> RunRecord:
        # In line with the writes, so that everything that is done counts.
        run = self._context.database.write(lambda db: runs.find(db, run_id))
        if run is None:
            raise ModelDeleted(f"there is no model {run_id}")
        if run.state in _UNUSABLE_STATES:
            raise ModelDeleted(f"model {run_id} {_UNUSABLE_STATES[RunState(run.state)]}")
        return run

    def _required_bytes(self, run: RunRecord) -> int:
        try:
            check_adapter_size(self._context.engine, adapter_spec(run))
            return self._context.engine.training_bytes(adapter_spec(run))
        except TinkexError as error:
            if run.applied == 0:
                # Its first operation fails for the same reason, and reports it.
                return 0
            raise ModelUnavailable(f"model {run.id} cannot be brought back now: {error}") from error

    def drop(self, run_id: str) -> None:
        """Forget a model's memory."""
        self._by_id.pop(run_id, None)
        self._context.engine.drop(run_id)

    def _restore(self, run: RunRecord) -> str | None:
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
            self._context.engine.drop(run.id)
            self._raise_unavailable(run, error)
        seconds, num_replayed = time.monotonic() - started, run.applied - run.snapshot_applied
        # Models that take turns in memory come back often, and nothing is replayed for them.
        level = logging.INFO if num_replayed else logging.DEBUG
        LOG.log(
            level, "%s is back: %d operations replayed in %.2f s", run.id, num_replayed, seconds
        )
        return last_kind

    def _raise_unavailable(self, run: RunRecord, error: Exception) -> NoReturn:
        if not _is_corruption(error):
            LOG.error("%s cannot be brought back now", run.id, exc_info=error)
            raise ModelUnavailable(f"model {run.id} cannot be brought back now: {error}") from error
        LOG.error("the state of %s is lost: %s", run.id, error)
        self._context.database.write(lambda db: runs.set_state(db, run.id, RunState.CORRUPTED))
        raise ModelStateCorrupted(
            f"the state of model {run.id} is damaged ({error}); make a new one from your last "
            "checkpoint"
        ) from error

    def _rebuild(self, run: RunRecord) -> str | None:
        engine, last_kind = self._context.engine, None
        engine.drop(run.id)
        if run.snapshot is not None:
            directory = self._context.home.snapshots / run.snapshot
            check_manifest(directory)
            engine.restore(run.id, adapter_spec(run), directory)
        applied = run.snapshot_applied
        while applied < run.applied:
            for job, payload in self._changes_after(run.id, applied):
                if job.applied != applied + 1:
                    raise ModelStateCorrupted(
                        f"operation {applied + 1} of {run.applied} is missing"
                    )
                replay(self._context, ModelTask(job, run, payload))
                applied, last_kind = job.applied, job.kind
        return last_kind

    def _changes_after(self, run_id: str, applied: int) -> list[tuple[JobRecord, bytes]]:
        found = self._context.database.read(
            lambda db: jobs.list_changes_after(db, run_id, applied, limit=MAX_REPLAY_PAYLOADS)
        )
        if not found:
            raise ModelStateCorrupted(f"operation {applied + 1} is missing")
        return found


def _is_corruption(error: Exception) -> bool:
    """Whether a state can never be read again; a disk or an engine may only be in trouble now."""
    if isinstance(error, ModelStateCorrupted):
        return True
    cause = error.__cause__
    is_trouble = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, CheckpointError) and not is_trouble


def new_snapshot_directory(snapshots: Path, run_id: str, applied: int) -> Path:
    """A place for a model's state after so many changes, which nothing else has ever had."""
    return snapshots / f"{run_id.replace(':', '_')}-{applied}-{new_id()[:8]}"
