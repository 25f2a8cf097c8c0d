"""Write models to disk: snapshots after changes, and evictions when other models need the memory.

A snapshot is written in the background, so that few changes are replayed after a crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tinkex.checkpoint.manifest import write_manifest
from tinkex.checkpoint.places import BlobsUnavailable
from tinkex.engine.memory_limits import choose_evictions
from tinkex.jobs.job_types import JobKind, JobOutcome
from tinkex.jobs.resident_models import (
    ModelUnavailable,
    ResidentModel,
    ResidentModels,
)
from tinkex.jobs.result_log import ResultEntry
from tinkex.jobs.worker_context import WorkerContext
from tinkex.logs import get_logger
from tinkex.store import runs
from tinkex.store.database import Connection
from tinkex.store.records import JobRecord, RunRecord
from tinkex.store.write_locks import SHARED
from tinkex.system.atomic import remove_directory, remove_scratch

LOG = get_logger(__name__)
#: Copies being written may use 1/4 of the memory budget; a single larger copy is allowed.
COPY_MEMORY_DIVISOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """When a snapshot of a model is due."""

    max_changes: int = 50
    """Number of changes."""
    max_bytes: int = 64 * 1024 * 1024
    """Payload bytes of the changes."""
    max_seconds: float = 60.0
    """Age of the oldest change."""

    def is_due(self, resident: ResidentModel, now: float) -> bool:
        """Return whether a snapshot of this model is due."""
        if resident.num_changes == 0:
            return False
        return (
            resident.num_changes >= self.max_changes
            or resident.changed_bytes >= self.max_bytes
            or now - resident.changed_at >= self.max_seconds
        )


class SnapshotWriter:
    """Copies states on the engine's thread and writes them on a background thread."""

    def __init__(
        self,
        context: WorkerContext,
        policy: SnapshotPolicy,
        check_fence: Callable[[Connection], None],
    ) -> None:
        self._context = context
        self._policy = policy
        self._check_fence = check_fence
        """Raises if this worker must not write: a snapshot must not be ahead of the store."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._pending_by_run: dict[str, Future[None]] = {}
        self._copy_bytes: dict[Future[None], int] = {}
        """The memory of each copy that is being written."""
        self._max_bytes = context.engine.max_adapter_bytes // COPY_MEMORY_DIVISOR

    def record_change(self, resident: ResidentModel, kind: str, num_bytes: int) -> None:
        """Count a change of a model."""
        if resident.num_changes == 0:
            resident.changed_at = time.monotonic()
        resident.applied += 1
        resident.changed_bytes += num_bytes
        resident.is_freshly_created = kind == JobKind.CREATE_MODEL

    def snapshot_if_due(self, resident: ResidentModel, kind: str) -> None:
        """Start a snapshot after a change if one is due."""
        # The loaded checkpoint may be deleted, so a load must not depend on replay for long.
        if kind == JobKind.LOAD_WEIGHTS or self._policy.is_due(resident, time.monotonic()):
            self.start_snapshot(resident)

    def snapshot_all_due(self, residents: list[ResidentModel]) -> None:
        """Start all snapshots that are due."""
        for resident in residents:
            if self._policy.is_due(resident, time.monotonic()):
                self.start_snapshot(resident)

    def start_snapshot(self, resident: ResidentModel) -> Future[None] | None:
        """Copy a model's state and write it in the background; returns None if that must wait."""
        run_id, applied = resident.run.id, resident.applied
        busy = self._pending_by_run.get(run_id)
        if busy is not None and not busy.done():
            return None
        if not self._context.storage.is_available:
            # The changes can be replayed; the next one tries again.
            return None
        if self.pending_bytes and self.pending_bytes + resident.memory_bytes > self._max_bytes:
            # The copy would use memory of resident models; try again when others are written.
            return None
        try:
            write = self._context.engine.snapshot(run_id)
        except Exception:
            # The changes can still be replayed, and raising would fail again at every change.
            LOG.exception("cannot copy the state of %s", run_id)
            return None
        before, resident.snapshot_applied, resident.changed_bytes = (
            resident.snapshot_applied,
            applied,
            0,
        )
        future = self._executor.submit(self._write, run_id, applied, write)
        self._pending_by_run[run_id] = future
        self._copy_bytes[future] = resident.memory_bytes

        def done(future: Future[None]) -> None:
            if self._pending_by_run.get(run_id) is future:
                del self._pending_by_run[run_id]
            del self._copy_bytes[future]
            if future.exception() is not None:
                # The next change tries again.
                resident.snapshot_applied = before
                LOG.error("cannot write the state of %s: %s", run_id, future.exception())

        future.add_done_callback(done)
        return future

    def snapshot_and_wait(self, resident: ResidentModel) -> bool:
        """Write a model's state and wait for it; returns False if writing fails."""
        self.wait()
        if resident.num_changes == 0:
            return True
        future = self.start_snapshot(resident)
        return future is not None and future.exception() is None

    @property
    def pending_bytes(self) -> int:
        """The memory of the copies that are being written."""
        return sum(size for future, size in list(self._copy_bytes.items()) if not future.done())

    def wait(self) -> None:
        """Wait until all copies are written."""
        for future in list(self._copy_bytes):
            future.exception()

    def _write(self, run_id: str, applied: int, write: Callable[..., None]) -> None:
        storage = self._context.storage
        with storage.new_snapshot(run_id, applied) as files:
            write(files.directory)
            write_manifest(files.directory)
        try:
            files.upload()
        finally:
            files.close()

        def enter(db: Connection) -> str | None:
            self._check_fence(db)
            return runs.set_snapshot(db, run_id, files.place, applied)

        surplus = self._context.database.write(enter, self._context.locks)
        if surplus is not None:
            storage.remove_snapshot(surplus)

    def remove_orphans(self) -> None:
        """Remove partial and unreferenced snapshots left by a crash."""
        snapshots = self._context.storage.home.snapshots
        snapshots.mkdir(parents=True, exist_ok=True)
        remove_scratch(snapshots)
        known = self._context.database.read(runs.list_snapshots)
        for path in snapshots.iterdir():
            if path.name not in known:
                remove_directory(path)

    def close(self) -> None:
        """Wait for pending writes and stop the thread."""
        self._executor.shutdown(wait=True)


class AdapterMemory:
    """Snapshots models after changes and evicts them when other models need the memory.

    A model for which `is_busy` returns True has a started job and is never evicted.
    """

    def __init__(
        self,
        context: WorkerContext,
        resident_models: ResidentModels,
        snapshots: SnapshotWriter,
        is_busy: Callable[[RunRecord], bool],
    ) -> None:
        self._context = context
        self._resident_models = resident_models
        self._snapshots = snapshots
        self._is_busy = is_busy
        resident_models.free_memory = self._free_memory

    def split_by_memory(self, batch: Sequence[JobRecord]) -> Iterator[list[JobRecord]]:
        """Split a batch so that the models of each portion fit into memory together.

        Models that are in memory come first: they can be evicted once their work is done.
        """
        resident = [
            job for job in batch if job.run_id is None or job.run_id in self._resident_models
        ]
        if resident:
            yield resident
        if len(resident) == len(batch):
            return
        budget = self._context.engine.max_adapter_bytes
        portion: list[JobRecord] = []
        num_bytes = 0
        for job in batch:
            if job in resident or job.run_id is None:
                continue
            size = self._resident_models.memory_bytes_of(job.run_id)
            if portion and num_bytes + size > budget:
                yield portion
                portion, num_bytes = [], 0
            portion.append(job)
            num_bytes += size
        if portion:
            yield portion

    def count_change(self, job: JobRecord, outcome: JobOutcome) -> int | None:
        """Return the number of the change, or None if the model did not change."""
        if not outcome.is_model_change or job.run_id is None:
            return None
        resident = self._resident_models.get(job.run_id)
        self._snapshots.record_change(resident, job.kind, job.payload_bytes)
        return resident.applied

    def snapshot_changed(self, entries: Sequence[ResultEntry]) -> None:
        """Start snapshots that are due, after the changes were handed to the store."""
        for entry in entries:
            run_id = entry.job.run_id
            if run_id is None:
                continue
            if not self._context.engine.has_adapter(run_id):
                # It was unloaded, or its creation failed.
                self._resident_models.drop(run_id)
            if entry.applied is not None:
                self._snapshots.snapshot_if_due(self._resident_models.get(run_id), entry.job.kind)

    def evict(self, run_id: str) -> bool:
        """Write a model to disk if it changed, then drop it; returns False if writing fails."""
        is_written = self._snapshots.snapshot_and_wait(self._resident_models.get(run_id))
        if is_written:
            self._resident_models.drop(run_id)
        return is_written

    def evict_idle(self) -> None:
        """Evict models whose sessions are over; they are loaded again when needed."""
        loaded = [one.run.id for one in self._resident_models if not self._is_busy(one.run)]
        if loaded:
            # Queued behind pending writes.
            idle = self._context.database.write(lambda db: runs.list_idle(db, loaded), SHARED)
            for run_id in idle:
                self.evict(run_id)

    def _free_memory(self, num_bytes: int) -> None:
        """Evict models until `num_bytes` fit into the budget; raises if a write fails."""
        budget = self._context.engine.max_adapter_bytes
        sizes = {resident.run.id: resident.memory_bytes for resident in self._resident_models}
        if sum(sizes.values()) + num_bytes + self._snapshots.pending_bytes <= budget:
            return
        self._snapshots.wait()
        busy = {one.run.id for one in self._resident_models if self._is_busy(one.run)}
        for run_id in choose_evictions(num_bytes, budget, sizes, busy):
            if not self.evict(run_id):
                if not self._context.storage.is_available:
                    raise BlobsUnavailable("others cannot be written to the object store")
                raise ModelUnavailable(
                    "the server has no memory for this model: others cannot be written to disk; "
                    "try again, or ask the operator to free disk space"
                )
            LOG.debug("evicted %s: other models need its memory", run_id)
