"""Shared dependencies of worker operations, and the task that an operation runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinkex import clock
from tinkex.checkpoint.storage import FileStorage
from tinkex.engine.protocol import Engine
from tinkex.errors import InvalidInput
from tinkex.ids import TinkerPath
from tinkex.jobs.quotas import QuotaChecks
from tinkex.store import checkpoints
from tinkex.store.database import Database
from tinkex.store.records import JobRecord, RunRecord
from tinkex.store.write_locks import EXCLUSIVE, SHARED, WriteLocks


@dataclass(frozen=True, slots=True)
class ModelTask:
    """A job of a model, with its request."""

    job: JobRecord
    run: RunRecord
    payload: bytes


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The engine, the store and the policies that operations use."""

    engine: Engine
    database: Database
    storage: FileStorage
    quotas: QuotaChecks = field(default_factory=QuotaChecks)
    max_unnamed_weights: int = 3
    """Number of unnamed sampler weights kept per model."""
    locks: WriteLocks = EXCLUSIVE
    """The locks of writes that depend on the worker's lease."""

    def check_checkpoint_quota(
        self, run: RunRecord, path: TinkerPath | None, num_bytes: int = 0
    ) -> None:
        """Refuse a checkpoint that exceeds the quotas of the model's tenant."""
        # Queued behind pending writes, so that the previous save counts.
        self.database.write(
            lambda db: self.quotas.check_checkpoint(db, run.tenant_id, path, num_bytes), SHARED
        )

    def check_path_unused(self, path: TinkerPath) -> None:
        """Refuse a checkpoint path that is in use."""
        # Queued behind pending writes, so that the previous save counts.
        now = clock.now()
        if self.database.write(lambda db: checkpoints.find(db, path, now), SHARED) is not None:
            raise InvalidInput(
                f"{path} exists; choose another name, delete it first, or save with overwrite=True "
                "where that is possible"
            )
