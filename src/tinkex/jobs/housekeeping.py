"""Delete expired rows and files in the background, in small portions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tinkex import clock
from tinkex.checkpoint.places import BlobsUnavailable
from tinkex.errors import StoreError
from tinkex.jobs.job_types import JobKind, LoadPayload
from tinkex.jobs.lease import CoordinatorLease
from tinkex.jobs.orphaned_jobs import OrphanedJobs
from tinkex.jobs.worker_context import WorkerContext
from tinkex.logs import get_logger
from tinkex.store import (
    blobs,
    checkpoints,
    coordination,
    jobs,
    retention,
    runs,
    sessions,
)
from tinkex.store.database import Connection
from tinkex.store.retention import RetentionPolicy
from tinkex.system.atomic import SCRATCH_PREFIX, remove_directory
from tinkex.wire.codec import decode_json

LOG = get_logger(__name__)
#: Interval of the search for old history, which is slower than the rest.
HISTORY_INTERVAL_SECONDS = 600.0
#: Processes without a heartbeat for longer than this are deleted.
DEAD_PROCESS_SECONDS = 300.0
#: Larger differences between the wall clock and the server's clock are logged.
CLOCK_JUMP_SECONDS = 60.0
#: Younger directories without a row are kept: their row may be about to be inserted.
ORPHAN_AGE_SECONDS = 3600.0
#: The same for places in the object store, whose upload may take long.
BLOB_ORPHAN_AGE_SECONDS = 86_400.0
#: Interval of the search for such places, which lists all objects.
BLOB_ORPHAN_INTERVAL_SECONDS = 86_400.0
#: Places that are removed or compared with the store at once.
_MAX_PLACES = 100
#: Rows of each kind that one transaction deletes. On PostgreSQL, others write meanwhile and wait.
MAX_SWEPT_ROWS = 2000
MAX_SWEPT_ROWS_POSTGRESQL = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class HousekeepingPolicy:
    """How long rows and files are kept."""

    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    interval_seconds: float = 2.0
    """Interval of the cleanup."""
    session_seconds: float = 120.0
    """A session without a heartbeat for this long expires."""
    ephemeral_seconds: float = 86_400.0
    """How long unnamed sampler weights are kept after the last heartbeat of their client."""
    finished_seconds: float = 60.0
    """How long a model's state and unnamed sampler weights are kept after its client has finished
    the session."""
    expired_seconds: float = 30 * 86_400.0
    """How long a model's state is kept after the last heartbeat of its client."""


class Housekeeper:
    """The cleanup thread."""

    def __init__(
        self,
        context: WorkerContext,
        policy: HousekeepingPolicy,
        *,
        lease: CoordinatorLease | None = None,
        coordinate: Callable[[], None] = lambda: None,
    ) -> None:
        """Only the holder of the lease works; it also calls `coordinate` in every round."""
        self._context = context
        self._policy = policy
        self._lease = lease
        self._coordinate = coordinate
        self._orphaned_jobs = OrphanedJobs(context.database)
        self._has_removed_orphans = False
        self._stop_event = threading.Event()
        self._next_history_at = 0.0
        self._next_blob_orphans_at = 0.0
        self._logged_jump_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Finish the current portion, then stop."""
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join()
        self._orphaned_jobs.close()
        if self._lease is not None:
            self._run_logged(self._lease.release)

    def _run(self) -> None:
        while not self._stop_event.wait(self._policy.interval_seconds):
            self._run_logged(self._run_if_leader)

    def _run_if_leader(self) -> None:
        """Run a round of cleanup if this worker is the one that cleans up."""
        if self._lease is not None and not self._lease.hold():
            return
        if not self._has_removed_orphans:
            self._has_removed_orphans = True
            self._remove_orphans()
        self._coordinate()
        self.run_once()

    def _run_logged(self, task: Callable[[], None]) -> None:
        try:
            task()
        except (StoreError, OSError) as error:
            LOG.warning("cleanup failed, will retry: %s", error)
        except Exception:
            # The thread must survive any error, or disk usage would grow without bound.
            LOG.exception("cleanup failed")

    def run_once(self) -> None:
        """Run one round of cleanup."""
        database, now = self._context.database, clock.now()
        unseen_since = now - self._policy.session_seconds
        database.write(lambda db: sessions.expire_unseen(db, unseen_since=unseen_since, now=now))
        before, after = now - DEAD_PROCESS_SECONDS, now + DEAD_PROCESS_SECONDS
        database.write(
            lambda db: coordination.delete_dead_processes(db, before=before, after=after)
        )
        self._orphaned_jobs.cancel()
        while database.write(self._sweep).has_more and not self._stop_event.is_set():
            continue
        self._remove_deleted_checkpoints(now)
        self._unload_unused_models(now)
        if now >= self._next_history_at:
            self._next_history_at = now + HISTORY_INTERVAL_SECONDS
            retention.delete_old(database, self._policy.retention, now)
        retention.vacuum(database)
        self._log_clock_jump(clock.wall_now() - now)
        if self._context.storage.has_blobs:
            self._remove_blobs(now)

    def _remove_blobs(self, now: float) -> None:
        """Remove objects that no row names; an outage of the object store only delays that."""
        try:
            self._remove_unused_blobs()
            if now >= self._next_blob_orphans_at:
                self._remove_orphaned_blobs()
                self._next_blob_orphans_at = now + BLOB_ORPHAN_INTERVAL_SECONDS
        except BlobsUnavailable as error:
            LOG.debug("cannot remove unused objects, will retry: %s", error)

    def _remove_unused_blobs(self) -> None:
        database, storage = self._context.database, self._context.storage
        while not self._stop_event.is_set():
            unused = database.read(lambda db: blobs.list_unused(db, _MAX_PLACES))
            if not unused:
                return
            for place in unused:
                storage.remove_place(place)
            database.write(partial(blobs.delete_unused, places=unused))

    def _remove_orphaned_blobs(self) -> None:
        """Remove places whose row was never inserted because of a crash."""
        database, storage = self._context.database, self._context.storage
        # By the clock of the object store, which made the timestamps.
        before = storage.cache.store.write_probe() - BLOB_ORPHAN_AGE_SECONDS
        listed = storage.cache.store.list_places()
        old = [place for place, changed_at in listed.items() if changed_at < before]
        for start in range(0, len(old), _MAX_PLACES):
            portion = old[start : start + _MAX_PLACES]
            for place in set(portion) - database.read(partial(blobs.list_known, places=portion)):
                LOG.info("removing the orphaned place %s", place)
                storage.remove_place(place)

    def _log_clock_jump(self, ahead_seconds: float) -> None:
        """Log a jump of the wall clock, once per jump."""
        if abs(ahead_seconds - self._logged_jump_seconds) > CLOCK_JUMP_SECONDS:
            LOG.warning(
                "the wall clock is now %+.0f s from the server's clock, which keeps its own time; "
                "restart the server to adopt the new time",
                ahead_seconds,
            )
            self._logged_jump_seconds = ahead_seconds

    def _sweep(self, db: Connection) -> retention.SweepResult:
        limit = MAX_SWEPT_ROWS if self._context.database.is_sqlite else MAX_SWEPT_ROWS_POSTGRESQL
        return retention.sweep(db, self._policy.retention, clock.now(), limit)

    def _remove_deleted_checkpoints(self, now: float) -> None:
        """Remove the files of deleted and expired checkpoints, then their rows."""
        database, home = self._context.database, self._context.storage.home
        deletable = database.write(lambda db: self._collect_deletable(db, now))
        if not deletable:
            return
        in_home = database.write(lambda db: checkpoints.delete_in_blobs(db, deletable))
        for checkpoint_id in in_home:
            remove_directory(home.checkpoint_directory(checkpoint_id))

        def delete_rows(db: Connection) -> None:
            for checkpoint_id in in_home:
                checkpoints.delete_row(db, checkpoint_id)

        database.write(delete_rows)

    def _unload_unused_models(self, now: float) -> None:
        """Remove the states of models whose sessions are over."""
        policy = self._policy

        def work(db: Connection) -> list[str]:
            runs.unload_unused(
                db,
                finished_before=now - policy.finished_seconds,
                expired_before=now - policy.expired_seconds,
            )
            return runs.clear_unloaded(db)

        for name in self._context.database.write(work):
            remove_directory(self._context.storage.home.snapshots / name)

    def _collect_deletable(self, db: Connection, now: float) -> list[str]:
        policy = self._policy
        find = partial(
            checkpoints.collect_deletable,
            ephemeral_seconds=policy.ephemeral_seconds,
            finished_seconds=policy.finished_seconds,
        )
        deletable = find(db, now)
        # Queried only if necessary, because it is slow and mostly returns nothing.
        loads = jobs.list_payloads_of_kind(db, JobKind.LOAD_WEIGHTS) if deletable else []
        needed = {decode_json(load, LoadPayload).checkpoint_id for load in loads if load}
        # An accepted load_weights job keeps its weights, also for a replay after a crash.
        if needed.isdisjoint(deletable):
            return deletable
        return find(db, now, in_use=needed)

    def _remove_orphans(self) -> None:
        """Remove directories whose row was never inserted because of a crash."""
        database, home = self._context.database, self._context.storage.home
        _remove_old_unknown(home.checkpoints, database.read(checkpoints.list_ids))
        _remove_old_unknown(home.snapshots, database.read(runs.list_snapshots))


def _remove_old_unknown(parent: Path, known: Collection[str]) -> None:
    if not parent.is_dir():
        return
    # File times use the wall clock, which may have jumped in either direction.
    before = min(clock.now(), clock.wall_now()) - ORPHAN_AGE_SECONDS
    for path in parent.iterdir():
        is_known = path.name in known and not path.name.startswith(SCRATCH_PREFIX)
        if not is_known and path.stat().st_mtime < before:
            LOG.info("removing the orphaned directory %s", path.name)
            remove_directory(path)
