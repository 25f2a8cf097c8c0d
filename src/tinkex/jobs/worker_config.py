"""Settings of a worker: the limits and policies of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinkex.jobs.fair_queue import BatchLimits
from tinkex.jobs.housekeeping import HousekeepingPolicy
from tinkex.jobs.quotas import QuotaChecks
from tinkex.jobs.snapshots import SnapshotPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Limits and policies of a worker."""

    batch_limits: BatchLimits = field(default_factory=BatchLimits)
    snapshots: SnapshotPolicy = field(default_factory=SnapshotPolicy)
    housekeeping: HousekeepingPolicy = field(default_factory=HousekeepingPolicy)
    max_attempts: int = 3
    """A job fails after it was interrupted by this number of worker crashes."""
    quotas: QuotaChecks = field(default_factory=QuotaChecks)
    max_unnamed_weights: int = 3
    """Number of unnamed sampler weights kept per model, the most recently used."""
    owner: str = ""
    """Identifies the starter of this worker; its next worker takes over the lease at once."""
    group_id: str = ""
    """The group whose jobs it runs; empty for the only worker of a server."""
    move_after_seconds: float = 30.0
    """A group without a worker for this long loses its models to other groups."""
    stream_host: str = "127.0.0.1"
    """The address at which API processes read the tokens of running samples."""
