"""Models in the engine's memory; restored from the newest snapshot plus replayed changes."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from tinkex.checkpoint.places import BlobsUnavailable
from tinkex.engine.protocol import check_adapter_size
from tinkex.errors import CheckpointError, RequestErrorCategory, TinkexError
from tinkex.jobs.job_types import WORKER_ERRORS, JobKind
from tinkex.jobs.operations import adapter_spec, replay
from tinkex.jobs.worker_context import ModelTask, WorkerContext
from tinkex.logs import get_logger
from tinkex.store import jobs, runs
from tinkex.store.records import JobRecord, RunRecord, RunState
from tinkex.store.write_locks import SHARED

LOG = get_logger(__name__)
#: Payloads in memory at once during a replay.
MAX_REPLAY_PAYLOADS = 8


class ModelStateCorrupted(TinkexError):
    """A model's state on disk is damaged."""

    category = RequestErrorCategory.Server


class ModelUnavailable(TinkexError):
    """A model cannot be loaded now, but its state is not lost."""

    category = RequestErrorCategory.Server


class ModelDeleted(TinkexError):
    """The model does not exist or was unloaded."""

    category = RequestErrorCategory.User


_UNUSABLE_STATES = {
    RunState.FAILED: "could not be created",
    RunState.UNLOADED: "was unloaded",
    RunState.CORRUPTED: "has lost its state; create a new one from your last checkpoint",
}


@dataclass(slots=True)
class ResidentModel:
    """A model in the engine's memory, and its changes since the last snapshot."""

    run: RunRecord
    applied: int
    """Number of operations that have changed it."""
    snapshot_applied: int
    """How many of them its newest snapshot includes, counting one that is being written."""
    changed_at: float = field(default_factory=time.monotonic)
    """Time of the oldest change that no snapshot includes."""
    changed_bytes: int = 0
    """Bytes of the payloads that no snapshot includes."""
    memory_bytes: int = 0
    """Its share of the memory budget: the peak memory of training it."""
    is_freshly_created: bool = False
    """Whether it was only created, so that its seed reproduces it."""

    @property
    def num_changes(self) -> int:
        """Number of changes that need a snapshot."""
        return 0 if self.is_freshly_created else self.applied - self.snapshot_applied


class ResidentModels:
    """The models in memory.

    `free_memory` is called with the size of a model before it is loaded, and raises if there is not
    enough memory.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._by_id: OrderedDict[str, ResidentModel] = OrderedDict()
        self.free_memory: Callable[[int], None] = lambda num_bytes: None

    def __iter__(self) -> Iterator[ResidentModel]:
        """Iterate over the models, least recently used first."""
        return iter(list(self._by_id.values()))

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._by_id

    def get(self, run_id: str) -> ResidentModel:
        """Return a model, loaded if necessary; raises if that fails."""
        resident = self._by_id.get(run_id)
        if resident is not None:
            self._by_id.move_to_end(run_id)
            return resident
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
        """Return the memory that a model needs; 0 if it is unusable."""
        resident = self._by_id.get(run_id)
        if resident is not None:
            return resident.memory_bytes
        try:
            return self._required_bytes(self._find_usable_run(run_id))
        except (ModelDeleted, ModelUnavailable):
            return 0

    def _find_usable_run(self, run_id: str) -> RunRecord:
        # Queued behind pending writes, so that the record is current.
        run = self._context.database.write(lambda db: runs.find(db, run_id), SHARED)
        if run is None:
            raise ModelDeleted(f"model {run_id} does not exist")
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
            raise ModelUnavailable(f"model {run.id} cannot be loaded now: {error}") from error

    def drop(self, run_id: str) -> None:
        """Drop a model from memory."""
        self._by_id.pop(run_id, None)
        self._context.engine.drop(run_id)

    def _restore(self, run: RunRecord) -> str | None:
        """Load a model; returns the kind of the last replayed operation, if any."""
        if run.applied == 0:
            return None
        started = time.monotonic()
        try:
            last_kind = self._rebuild(run)
        except WORKER_ERRORS:
            raise
        except BlobsUnavailable:
            # The job that needs the model is tried again.
            self._context.engine.drop(run.id)
            raise
        except Exception as error:  # noqa: BLE001 - one model must not stop the others
            self._context.engine.drop(run.id)
            self._raise_unavailable(run, error)
        seconds, num_replayed = time.monotonic() - started, run.applied - run.snapshot_applied
        # Models that are evicted and reloaded often need no replay; do not log those.
        level = logging.INFO if num_replayed else logging.DEBUG
        LOG.log(
            level, "restored %s: %d operations replayed in %.2f s", run.id, num_replayed, seconds
        )
        return last_kind

    def _raise_unavailable(self, run: RunRecord, error: Exception) -> NoReturn:
        if not _is_corruption(error):
            LOG.error("%s cannot be loaded now", run.id, exc_info=error)
            raise ModelUnavailable(f"model {run.id} cannot be loaded now: {error}") from error
        LOG.error("the state of %s is lost: %s", run.id, error)
        self._context.database.write(lambda db: runs.set_state(db, run.id, RunState.CORRUPTED))
        raise ModelStateCorrupted(
            f"the state of model {run.id} is damaged ({error}); create a new one from your last "
            "checkpoint"
        ) from error

    def _rebuild(self, run: RunRecord) -> str | None:
        engine, last_kind = self._context.engine, None
        engine.drop(run.id)
        if run.snapshot is not None:
            with self._context.storage.open_snapshot(run.snapshot) as directory:
                engine.restore(run.id, adapter_spec(run), directory)
        applied = run.snapshot_applied
        while applied < run.applied:
            for job, payload in self._changes_after(run.id, applied):
                if job.applied != applied + 1:
                    raise ModelStateCorrupted(
                        f"operation {applied + 1} of {run.applied} is missing"
                    )
                if job.payload_ref is not None:
                    payload = self._context.storage.read_payload(job.payload_ref, wait=True)
                replay(self._context, ModelTask(job, run, payload))
                applied, last_kind = job.applied, job.kind
        return last_kind

    def _changes_after(self, run_id: str, applied: int) -> list[tuple[JobRecord, bytes]]:
        changes = self._context.database.read(
            lambda db: jobs.list_changes_after(db, run_id, applied, limit=MAX_REPLAY_PAYLOADS)
        )
        if not changes:
            raise ModelStateCorrupted(f"operation {applied + 1} is missing")
        return changes


def _is_corruption(error: Exception) -> bool:
    """Return whether a state is lost for good; disk and engine errors may be temporary."""
    if isinstance(error, ModelStateCorrupted):
        return True
    cause = error.__cause__
    is_disk_error = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, CheckpointError) and not is_disk_error
