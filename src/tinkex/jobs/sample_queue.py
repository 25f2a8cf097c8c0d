"""Samples that wait: fair over tenants by tokens, and in turns over a tenant's sampling sessions.

Pure decisions over headers of jobs; no clock, no database, no engine.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from tinkex.jobs.fair_share import FairShare
from tinkex.store.records import Job

Source: TypeAlias = tuple[str, str]
"""A tenant, and what its samples are drawn from: a sampling session or a base model."""


def source_of(job: Job) -> Source:
    """What a sample is drawn from."""
    return job.tenant_id, job.sampler_id or job.base_model or job.session_id


class SampleQueue:
    """Samples that wait for a place in the engine."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[Source, deque[Job]]] = OrderedDict()
        self._share = FairShare()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, job: Job) -> None:
        """Take in a sample."""
        if job.tenant_id not in self._waiting:
            self._waiting[job.tenant_id] = OrderedDict()
            self._share.join(job.tenant_id)
        self._waiting[job.tenant_id].setdefault(source_of(job), deque()).append(job)

    def drop(self, job_ids: Collection[str]) -> set[str]:
        """Forget samples that were cancelled before they ran; returns those that waited here."""
        dropped = set()
        for tenant_id, sources in list(self._waiting.items()):
            for source, jobs in list(sources.items()):
                dropped |= {job.id for job in jobs if job.id in job_ids}
                sources[source] = deque(job for job in jobs if job.id not in job_ids)
                self._forget_empty(tenant_id, source)
        return dropped

    def take(self, num_free: int, running: Iterable[Job], max_running: int) -> list[Job]:
        """The samples that start now, beside those that run.

        They are as many as there are places, and a few more: a tenant none of whose samples runs
        starts one although no place is free, and so does a source of a tenant. A sample with
        attempts runs alone, because a worker died during it, perhaps because of it.
        """
        held, taken = list(running), list[Job]()
        while (job := self._next(num_free - len(taken), held, max_running)) is not None:
            if job.attempts and held:
                break
            self._pop(job)
            taken.append(job)
            held.append(job)
            if job.attempts:
                break
        return taken

    def refund(self, job: Job, num_tokens: int) -> None:
        """Note that a sample took fewer tokens than it might have."""
        self._share.charge(job.tenant_id, num_tokens - job.num_tokens)

    def _next(self, num_free: int, held: Sequence[Job], max_running: int) -> Job | None:
        tenants = {job.tenant_id for job in held}
        sources = {source_of(job) for job in held}
        for tenant_id in self._share.order(self._waiting):
            for source, jobs in self._waiting[tenant_id].items():
                is_new_tenant = tenant_id not in tenants and len(held) < 2 * max_running
                is_new_source = source not in sources and 2 * len(held) < 3 * max_running
                if num_free > 0 or is_new_tenant or is_new_source:
                    return jobs[0]
        return None

    def _pop(self, job: Job) -> None:
        tenant_id, source = job.tenant_id, source_of(job)
        sources = self._waiting[tenant_id]
        sources[source].popleft()
        self._share.pick(tenant_id, job.num_tokens or 1)
        sources.move_to_end(source)
        self._waiting.move_to_end(tenant_id)
        self._forget_empty(tenant_id, source)

    def _forget_empty(self, tenant_id: str, source: Source) -> None:
        sources = self._waiting[tenant_id]
        if not sources[source]:
            del sources[source]
        if not sources:
            del self._waiting[tenant_id]
            self._share.leave(tenant_id)
