"""Order of waiting samples: fair between tenants by tokens, round-robin within a tenant.

Pure decisions over job records: no clock, database or engine.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from tinkex.jobs.fair_share import FairShare
from tinkex.store.records import JobRecord

SampleSource: TypeAlias = tuple[str, str]
"""A tenant, and the sampling session or base model of its samples."""


def sample_source(job: JobRecord) -> SampleSource:
    """Return the source that a sample is drawn from."""
    return job.tenant_id, job.sampler_id or job.base_model or job.session_id


class SampleQueue:
    """Samples that wait for a slot in the engine."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[SampleSource, deque[JobRecord]]] = OrderedDict()
        self._fair_share = FairShare()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, job: JobRecord) -> None:
        """Add a sample."""
        if job.tenant_id not in self._waiting:
            self._waiting[job.tenant_id] = OrderedDict()
            self._fair_share.join(job.tenant_id)
        self._waiting[job.tenant_id].setdefault(sample_source(job), deque()).append(job)

    def cancel(self, job_ids: Collection[str]) -> set[str]:
        """Remove cancelled samples; returns the ids of those that were waiting."""
        dropped = set()
        for tenant_id, sources in list(self._waiting.items()):
            for source, jobs in list(sources.items()):
                dropped |= {job.id for job in jobs if job.id in job_ids}
                sources[source] = deque(job for job in jobs if job.id not in job_ids)
                self._remove_empty(tenant_id, source)
        return dropped

    def next_samples(
        self, num_free: int, running: Iterable[JobRecord], max_running: int
    ) -> list[JobRecord]:
        """Return the samples to start beside the running ones.

        They fill the free slots and exceed them slightly: a tenant or source without a running
        sample starts one even if no slot is free. A sample with attempts may have crashed a worker,
        so it runs alone.
        """
        active, taken = list(running), list[JobRecord]()
        while (job := self._next_startable(num_free - len(taken), active, max_running)) is not None:
            if job.attempts and active:
                break
            self._pop(job)
            taken.append(job)
            active.append(job)
            if job.attempts:
                break
        return taken

    def num_tokens(self) -> int:
        """Sum of the tokens of all waiting samples."""
        return sum(
            job.num_tokens
            for sources in self._waiting.values()
            for jobs in sources.values()
            for job in jobs
        )

    def refund(self, job: JobRecord, num_tokens: int) -> None:
        """Refund the tokens that a finished sample did not use."""
        self._fair_share.charge(job.tenant_id, num_tokens - job.num_tokens)

    def _next_startable(
        self, num_free: int, running: Sequence[JobRecord], max_running: int
    ) -> JobRecord | None:
        tenants = {job.tenant_id for job in running}
        sources = {sample_source(job) for job in running}
        for tenant_id in self._fair_share.sort_least_served(self._waiting):
            for source, jobs in self._waiting[tenant_id].items():
                is_new_tenant = tenant_id not in tenants and len(running) < 2 * max_running
                is_new_source = source not in sources and 2 * len(running) < 3 * max_running
                if num_free > 0 or is_new_tenant or is_new_source:
                    return jobs[0]
        return None

    def _pop(self, job: JobRecord) -> None:
        tenant_id, source = job.tenant_id, sample_source(job)
        sources = self._waiting[tenant_id]
        sources[source].popleft()
        self._fair_share.pick(tenant_id, job.num_tokens or 1)
        sources.move_to_end(source)
        self._waiting.move_to_end(tenant_id)
        self._remove_empty(tenant_id, source)

    def _remove_empty(self, tenant_id: str, source: SampleSource) -> None:
        sources = self._waiting[tenant_id]
        if not sources[source]:
            del sources[source]
        if not sources:
            del self._waiting[tenant_id]
            self._fair_share.leave(tenant_id)
