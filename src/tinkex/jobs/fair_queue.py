"""Order of jobs: which run next, fairly between tenants and in order within a model.

Pure decisions over job records: no database or engine.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from tinkex.jobs.fair_share import FairShare
from tinkex.jobs.job_types import PASS_KINDS, JobKind
from tinkex.jobs.operation_order import ModelLane
from tinkex.jobs.sample_queue import SampleQueue
from tinkex.store.records import JobRecord, RunRecord

P = ParamSpec("P")
T = TypeVar("T")
#: Target duration of one batch of operations.
TARGET_BATCH_SECONDS = 0.005
MAX_OPERATIONS = 32
#: Weight of the newest duration in the running mean.
_EMA_WEIGHT = 0.2
#: Tokens charged for an operation that is not a pass.
OPERATION_TOKENS = 64
#: Started passes per tenant; each holds gradients in memory.
MAX_SUSPENDED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of one batch."""

    max_pass_bytes: int = 2_000_000
    """Payload bytes of the passes in one batch; a larger pass runs alone."""
    max_pass_tokens: int = 1024
    """Tokens of the passes in one batch; a longer pass runs alone, in steps of this size."""
    max_passes: int = 32
    """Passes in one batch."""
    gap_seconds: float = 5.0
    """How long a job waits for a missing job with a lower sequence number."""


@dataclass(slots=True)
class _TenantQueue:
    """The training jobs of one tenant."""

    lanes: OrderedDict[str, ModelLane] = field(default_factory=OrderedDict)
    suspended: deque[JobRecord] = field(default_factory=deque)
    """Started, unfinished passes."""
    is_resumed_next: bool = True
    """Whether a suspended pass runs before a new job."""


class FairQueue:
    """All waiting jobs; `next_batch` and `next_samples` return what runs next."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        # Separate from the samples: sampling must not use up a tenant's share of training.
        self._tenants: OrderedDict[str, _TenantQueue] = OrderedDict()
        self._fair_share = FairShare()
        self._sample_queue = SampleQueue()
        self._charged_tokens: dict[str, int] = {}
        """Tokens charged for each started job."""
        self._deferred: dict[str, tuple[float, JobRecord]] = {}
        """Started jobs that wait for the object store, and when to try them again."""
        self._job_ids: set[str] = set()
        self._cancelled: set[str] = set()

    def __len__(self) -> int:
        return len(self._job_ids)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._job_ids

    def add(self, job: JobRecord, next_seq: int = 0, now: float = 0.0) -> None:
        """Add a job; `next_seq` is its model's next sequence number, used for a new lane."""
        if job.id in self._job_ids:
            return
        self._job_ids.add(job.id)
        if job.kind == JobKind.SAMPLE:
            self._sample_queue.add(job)
            return
        if job.cancelled_at is not None:
            self._cancelled.add(job.id)
        if job.tenant_id not in self._tenants:
            self._tenants[job.tenant_id] = _TenantQueue()
            self._fair_share.join(job.tenant_id)
        lanes = self._tenants[job.tenant_id].lanes
        # A job without a model gets its own lane.
        lane = lanes.setdefault(job.run_id or job.id, ModelLane(next_seq))
        lane.add(job, now)

    def has_lane(self, tenant_id: str, run_id: str) -> bool:
        """Return whether a model has jobs in the queue."""
        tenant = self._tenants.get(tenant_id)
        return tenant is not None and run_id in tenant.lanes

    @property
    def num_lanes(self) -> int:
        """Number of models with jobs in the queue."""
        return sum(len(tenant.lanes) for tenant in self._tenants.values())

    def num_queued_tokens(self) -> int:
        """Estimate the tokens of all waiting and suspended jobs."""
        waiting = (
            entry[-1]
            for tenant in self._tenants.values()
            for lane in tenant.lanes.values()
            for entry in lane.waiting
        )
        num_waiting = sum(max(OPERATION_TOKENS, job.num_tokens) for job in waiting)
        num_suspended = sum(
            max(0, job.num_tokens - self._charged_tokens.get(job.id, 0))
            for job in self._suspended_jobs()
        )
        return num_waiting + num_suspended + self._sample_queue.num_tokens()

    def remove_model(self, run: RunRecord) -> None:
        """Remove the waiting jobs of a model that another group takes over."""
        tenant = self._tenants.get(run.tenant_id)
        lane = tenant.lanes.pop(run.id, None) if tenant is not None else None
        if tenant is None or lane is None:
            return
        removed = {entry[-1].id for entry in lane.waiting}
        self._job_ids -= removed
        self._cancelled -= removed
        self._remove_if_empty(run.tenant_id)

    def is_busy(self, run: RunRecord) -> bool:
        """Return whether a job of this model is running or suspended."""
        tenant = self._tenants.get(run.tenant_id)
        lane = tenant.lanes.get(run.id) if tenant is not None else None
        return lane is not None and lane.is_busy

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Remove waiting samples; waiting passes fail when they are next in their lane."""
        known = {job_id for job_id in job_ids if job_id in self._job_ids}
        dropped = self._sample_queue.cancel(known)
        self._job_ids -= dropped
        self._cancelled |= known - dropped

    def is_cancelled(self, job: JobRecord) -> bool:
        """Return whether an unfinished job was cancelled."""
        return job.id in self._cancelled

    # --- training ----------------------------------------------------------------------------
    def next_batch(self, now: float, max_operations: int = 1) -> list[JobRecord]:
        """Return the next batch: operations to run in sequence, passes to run together, or one
        suspended pass.

        The tenant that was served the fewest tokens comes first. A deferred job runs alone.
        """
        due = [job for until, job in self._deferred.values() if until <= now]
        if due:
            del self._deferred[due[0].id]
            return due[:1]
        for tenant_id in self._fair_share.sort_least_served(self._tenants):
            tenant = self._tenants[tenant_id]
            job = self._next_ready(tenant, now)
            if tenant.suspended and (job is None or tenant.is_resumed_next):
                return self._resume(tenant)
            if job is not None:
                tenant.is_resumed_next = True
                return self._fill_batch(job, now, max_operations)
        return []

    def _fill_batch(self, first: JobRecord, now: float, max_operations: int) -> list[JobRecord]:
        batch = [first]
        self._start_job(first)
        while (job := self._next_fitting(batch, now, max_operations)) is not None:
            batch.append(job)
            self._start_job(job)
        return batch

    def _next_fitting(
        self, batch: list[JobRecord], now: float, max_operations: int
    ) -> JobRecord | None:
        """Return a job that fits into the batch, of the tenant that was served least."""
        for tenant_id in self._fair_share.sort_least_served(self._tenants):
            job = self._next_ready(self._tenants[tenant_id], now)
            if job is not None and self._can_join(batch, job, max_operations):
                return job
        return None

    def _next_ready(self, tenant: _TenantQueue, now: float) -> JobRecord | None:
        for lane in tenant.lanes.values():
            job = lane.next_ready(now, self._limits.gap_seconds)
            if job is not None and self._can_start(tenant, job):
                return job
        return None

    def _can_start(self, tenant: _TenantQueue, job: JobRecord) -> bool:
        """Return whether a job may start now.

        A job with attempts may have crashed a worker, so it runs alone: otherwise all started jobs
        would reach the limit of attempts together.
        """
        if job.attempts:
            return not any(self._suspended_jobs())
        if not self._is_long(job):
            return True
        if any(each.attempts for each in self._suspended_jobs()) or self._has_retried_job():
            return False
        return len(tenant.suspended) < MAX_SUSPENDED

    def _suspended_jobs(self) -> Iterator[JobRecord]:
        return (job for tenant in self._tenants.values() for job in tenant.suspended)

    def _has_retried_job(self) -> bool:
        """Return whether a job with attempts waits for started jobs to finish."""
        lanes = (lane for tenant in self._tenants.values() for lane in tenant.lanes.values())
        return any(lane.waiting[0][-1].attempts for lane in lanes if lane.waiting)

    def _is_long(self, job: JobRecord) -> bool:
        return job.kind in PASS_KINDS and job.num_tokens > self._limits.max_pass_tokens

    def _can_join(self, batch: list[JobRecord], job: JobRecord, max_operations: int) -> bool:
        if batch[0].attempts or job.attempts:
            # It may have crashed a worker and must not take other jobs with it.
            return False
        if batch[0].kind not in PASS_KINDS:
            return job.kind not in PASS_KINDS and len(batch) < max_operations
        return (
            job.kind in PASS_KINDS
            and len(batch) < self._limits.max_passes
            and _sum_with(batch, job, "payload_bytes") <= self._limits.max_pass_bytes
            and _sum_with(batch, job, "num_tokens") <= self._limits.max_pass_tokens
        )

    def _start_job(self, job: JobRecord) -> None:
        lanes = self._tenants[job.tenant_id].lanes
        name = job.run_id or job.id
        lane = lanes[name]
        lane.waiting.pop(0)
        lane.is_busy = True
        # Round-robin: next time the tenant's other models come first, and other tenants before.
        lanes.move_to_end(name)
        self._tenants.move_to_end(job.tenant_id)
        num_tokens = self._next_step_tokens(job)
        self._charged_tokens[job.id] = num_tokens
        self._fair_share.pick(job.tenant_id, num_tokens)

    def _next_step_tokens(self, job: JobRecord) -> int:
        """Estimate the tokens of a job's next step."""
        if job.kind not in PASS_KINDS:
            return OPERATION_TOKENS
        return max(1, min(job.num_tokens, self._limits.max_pass_tokens))

    def _resume(self, tenant: _TenantQueue) -> list[JobRecord]:
        job = tenant.suspended.popleft()
        tenant.is_resumed_next = False
        self._tenants.move_to_end(job.tenant_id)
        self._fair_share.pick(job.tenant_id, self._next_step_tokens(job))
        self._charged_tokens[job.id] += self._next_step_tokens(job)
        return [job]

    def suspend(self, job: JobRecord, num_tokens: int) -> None:
        """Put a started pass back; `num_tokens` of it are computed."""
        self._fair_share.charge(job.tenant_id, num_tokens - self._charged_tokens[job.id])
        self._charged_tokens[job.id] = num_tokens
        self._tenants[job.tenant_id].suspended.append(job)

    def defer(self, job: JobRecord, until: float) -> None:
        """Try a started job again later; the next jobs of its model wait for it."""
        self._deferred[job.id] = (until, job)

    @property
    def deferred_ids(self) -> list[str]:
        """The jobs that are tried again later."""
        return list(self._deferred)

    def finish(self, job: JobRecord) -> None:
        """Remove a finished job, so that the next one of its model may run."""
        self._deferred.pop(job.id, None)
        self._job_ids.discard(job.id)
        self._cancelled.discard(job.id)
        self._charged_tokens.pop(job.id, None)
        tenant = self._tenants.get(job.tenant_id)
        name = job.run_id or job.id
        if tenant is None or name not in tenant.lanes:
            return
        if job in tenant.suspended:
            tenant.suspended.remove(job)
        lane = tenant.lanes[name]
        lane.finish(job)
        if not lane.waiting:
            del tenant.lanes[name]
        self._remove_if_empty(job.tenant_id)

    def _remove_if_empty(self, tenant_id: str) -> None:
        if not self._tenants[tenant_id].lanes:
            del self._tenants[tenant_id]
            self._fair_share.leave(tenant_id)

    def next_poll_at(self) -> float | None:
        """Return when the first job stops waiting: for a missing sequence number, or deferred."""
        times = [until for until, _ in self._deferred.values()]
        times += [
            ends_at
            for tenant in self._tenants.values()
            for lane in tenant.lanes.values()
            if (ends_at := lane.gap_ends_at(self._limits.gap_seconds)) is not None
        ]
        return min(times, default=None)

    # --- sampling ----------------------------------------------------------------------------
    def next_samples(
        self, num_free: int, running: Iterable[JobRecord], max_running: int
    ) -> list[JobRecord]:
        """Return the samples to start now; see `SampleQueue.next_samples`."""
        taken = self._sample_queue.next_samples(num_free, running, max_running)
        for job in taken:
            self._job_ids.discard(job.id)
        return taken

    def finish_sample(self, job: JobRecord, num_tokens: int) -> None:
        """Correct the charge of a finished sample."""
        self._sample_queue.refund(job, num_tokens)


def _sum_with(batch: Iterable[JobRecord], job: JobRecord, field_name: str) -> int:
    total: int = sum(getattr(each, field_name) for each in (*batch, job))
    return total


class AdaptiveBatchSize:
    """Chooses the batch size from a running mean of operation durations."""

    def __init__(self) -> None:
        self._mean_seconds = TARGET_BATCH_SECONDS

    @property
    def max_operations(self) -> int:
        """The number of operations allowed in the next batch."""
        return max(
            1, min(MAX_OPERATIONS, int(TARGET_BATCH_SECONDS / max(self._mean_seconds, 1e-6)))
        )

    def record(self, seconds: float) -> None:
        """Record the duration of an operation; a slow one counts fully."""
        mean = self._mean_seconds + _EMA_WEIGHT * (seconds - self._mean_seconds)
        self._mean_seconds = max(mean, seconds) if seconds > TARGET_BATCH_SECONDS else mean

    def run_timed(self, operation: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run an operation and record its duration."""
        started = time.perf_counter()
        try:
            return operation(*args, **options)
        finally:
            self.record(time.perf_counter() - started)
