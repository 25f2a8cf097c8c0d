"""Keep the models in memory within a budget: the least recently used are evicted to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tinkex.engine.memory_limits import choose_evictions
from tinkex.jobs.resident_models import ModelUnavailable, ResidentModels
from tinkex.jobs.snapshots import SnapshotWriter
from tinkex.jobs.worker_context import WorkerContext
from tinkex.logs import get_logger
from tinkex.store import runs
from tinkex.store.records import JobRecord, RunRecord

LOG = get_logger(__name__)


class AdapterMemory:
    """Evicts models when other models need the memory.

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
            for run_id in self._context.database.write(lambda db: runs.list_idle(db, loaded)):
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
                raise ModelUnavailable(
                    "the server has no memory for this model: others cannot be written to disk; "
                    "try again, or ask the operator to free disk space"
                )
            LOG.debug("evicted %s: other models need its memory", run_id)
