"""Writing models to disk in the background, so that a crash costs little to repair."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tinkex.checkpoint.manifest import write_manifest
from tinkex.jobs.job_types import JobKind
from tinkex.jobs.resident_models import ResidentModel, new_snapshot_directory
from tinkex.jobs.worker_context import WorkerContext
from tinkex.logs import get_logger
from tinkex.store import runs
from tinkex.store.database import Connection
from tinkex.system.atomic import new_directory, remove_directory, remove_scratch

LOG = get_logger(__name__)
#: Copies that are being written may take this part of the memory budget, or be one alone.
COPY_MEMORY_DIVISOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """When a model's state is written to disk."""

    max_changes: int = 50
    """After so many changes."""
    max_bytes: int = 64 * 1024 * 1024
    """When so many payload bytes are kept for it."""
    max_seconds: float = 60.0
    """When its oldest change that is not on disk is so old."""

    def is_due(self, resident: ResidentModel, now: float) -> bool:
        """Whether to write this model now."""
        if resident.num_changes == 0:
            return False
        return (
            resident.num_changes >= self.max_changes
            or resident.changed_bytes >= self.max_bytes
            or now - resident.changed_at >= self.max_seconds
        )


class SnapshotWriter:
    """Copies states on the engine's thread, and writes them on its own."""

    def __init__(
        self,
        context: WorkerContext,
        policy: SnapshotPolicy,
        check_fence: Callable[[Connection], None],
    ) -> None:
        self._context = context
        self._policy = policy
        self._check_fence = check_fence
        """Raises if this worker may not write: a state must not be ahead of what is on record."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._pending_by_run: dict[str, Future[None]] = {}
        self._copy_bytes: dict[Future[None], int] = {}
        """The memory of each copy that is being written."""
        self._max_bytes = context.engine.max_adapter_bytes // COPY_MEMORY_DIVISOR

    def record_change(self, resident: ResidentModel, kind: str, num_bytes: int) -> None:
        """Count a change of this kind."""
        if resident.num_changes == 0:
            resident.changed_at = time.monotonic()
        resident.applied += 1
        resident.changed_bytes += num_bytes
        resident.is_freshly_created = kind == JobKind.CREATE_MODEL

    def snapshot_if_due(self, resident: ResidentModel, kind: str) -> None:
        """Write a model after a change of this kind, if it is time."""
        # What was loaded may be deleted by its owner, so it is not replayed for long.
        if kind == JobKind.LOAD_WEIGHTS or self._policy.is_due(resident, time.monotonic()):
            self.start_snapshot(resident)

    def snapshot_all_due(self, residents: list[ResidentModel]) -> None:
        """Write models whose changes are old."""
        for resident in residents:
            if self._policy.is_due(resident, time.monotonic()):
                self.start_snapshot(resident)

    def start_snapshot(self, resident: ResidentModel) -> Future[None] | None:
        """Copy a model's state now and write it soon; None if its last one is being written."""
        run_id, applied = resident.run.id, resident.applied
        busy = self._pending_by_run.get(run_id)
        if busy is not None and not busy.done():
            return None
        if self.pending_bytes and self.pending_bytes + resident.memory_bytes > self._max_bytes:
            # Its copy must not take the memory of a model; it is written when others are done.
            return None
        try:
            write = self._context.engine.snapshot(run_id)
        except Exception:
            # It can still be replayed; a worker that died of this would die at every change.
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
                # It is as if nothing had been written; the next change tries again.
                resident.snapshot_applied = before
                LOG.error("cannot write the state of %s: %s", run_id, future.exception())

        future.add_done_callback(done)
        return future

    def snapshot_and_wait(self, resident: ResidentModel) -> bool:
        """Write a model's state and wait for it; False if it could not be written."""
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
        """Wait until no copy is in memory."""
        for future in list(self._copy_bytes):
            future.exception()

    def _write(self, run_id: str, applied: int, write: Callable[..., None]) -> None:
        snapshots = self._context.home.snapshots
        final = new_snapshot_directory(snapshots, run_id, applied)
        with new_directory(final) as directory:
            write(directory)
            write_manifest(directory)

        def enter(db: Connection) -> str | None:
            self._check_fence(db)
            return runs.set_snapshot(db, run_id, final.name, applied)

        surplus = self._context.database.write(enter)
        if surplus is not None:
            remove_directory(snapshots / surplus)

    def remove_orphans(self) -> None:
        """Remove what a crash left: half-written states, and states that nobody needs."""
        snapshots = self._context.home.snapshots
        snapshots.mkdir(parents=True, exist_ok=True)
        remove_scratch(snapshots)
        known = self._context.database.read(runs.list_snapshots)
        for path in snapshots.iterdir():
            if path.name not in known:
                remove_directory(path)

    def close(self) -> None:
        """Wait for what is being written."""
        self._executor.shutdown(wait=True)
