"""What a piece of work is done with, and the piece of work itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinkex import clock
from tinkex.checkpoint.verification import VerifiedCheckpoints
from tinkex.engine.protocol import Engine
from tinkex.errors import InvalidInput
from tinkex.home import Home
from tinkex.ids import TinkerPath
from tinkex.jobs.quotas import QuotaChecks
from tinkex.store import checkpoints
from tinkex.store.database import Database
from tinkex.store.records import JobRecord, RunRecord


@dataclass(frozen=True, slots=True)
class ModelTask:
    """A promise of a model's, with what it was asked for."""

    job: JobRecord
    run: RunRecord
    payload: bytes


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What the worker works with."""

    engine: Engine
    database: Database
    home: Home
    verified_checkpoints: VerifiedCheckpoints = field(default_factory=VerifiedCheckpoints)
    """Checkpoints whose files this process has compared with their manifest, or has written."""
    quotas: QuotaChecks = field(default_factory=QuotaChecks)
    max_unnamed_weights: int = 3
    """How many unnamed sampler weights a model keeps."""

    def check_checkpoint_quota(
        self, run: RunRecord, path: TinkerPath | None, num_bytes: int = 0
    ) -> None:
        """Refuse a checkpoint that the quotas of the model's tenant do not allow."""
        # Asked in line with the writes, so that a save just before this one counts.
        self.database.write(
            lambda db: self.quotas.check_checkpoint(db, run.tenant_id, path, num_bytes)
        )

    def check_path_unused(self, path: TinkerPath) -> None:
        """Refuse a checkpoint's name that is in use."""
        # Asked in line with the writes, so that a save just before this one counts.
        now = clock.now()
        if self.database.write(lambda db: checkpoints.find(db, path, now)) is not None:
            raise InvalidInput(
                f"{path} exists; choose another name, delete it first, or save with overwrite=True "
                "where that is possible"
            )
