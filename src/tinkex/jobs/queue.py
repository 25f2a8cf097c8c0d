"""The job queue as API processes use it: submit, look up and cancel jobs.

A job is committed before its id is returned; the same idempotency key always returns the same job.
"""

from __future__ import annotations

import hashlib
import hmac
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from tinkex import clock
from tinkex.errors import (
    BadRequestError,
    NotFoundError,
    PromiseExpiredError,
    RateLimitError,
    StoreBusy,
)
from tinkex.jobs.groups import Placement, ready_views
from tinkex.jobs.job_types import CANCELLED, PASS_KINDS, JobKind
from tinkex.jobs.quotas import QuotaChecks
from tinkex.jobs.wakeup import ALIVE_SECONDS, WakeupSender
from tinkex.logs import get_logger
from tinkex.store import groups, jobs
from tinkex.store.coordination import group_lease
from tinkex.store.database import Connection, Database
from tinkex.store.records import JobRecord, NewJob
from tinkex.store.write_locks import EXCLUSIVE, SHARED, WriteLocks, lease_locks, sampler_locks

LOG = get_logger(__name__)

PrepareJob: TypeAlias = Callable[[Connection], None]
_TAG_LENGTH = 12
#: Prefix of a job id in a wake-up message that asks the worker to stop the job.
CANCEL_PREFIX = "-"
#: Prefix of the number of a new job in a wake-up message.
NUMBER_PREFIX = "+"
#: How long the list of groups is cached.
GROUPS_CACHE_SECONDS = 1.0
#: Number of placed models that are counted until their groups report them.
MAX_PLACED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How many jobs and bytes may be unfinished."""

    max_jobs_per_tenant: int = 4096
    """Unfinished jobs of one tenant."""
    max_bytes_per_tenant: int = 1 << 30
    """Payload bytes of one tenant's unfinished jobs."""
    max_jobs: int = 65_536
    """Unfinished jobs of all tenants."""
    retry_after_seconds: float = 1.0
    """Retry-After of a refused request."""


class JobQueue:
    """The jobs of one store."""

    def __init__(
        self,
        database: Database,
        limits: QueueLimits,
        secret: bytes,
        quotas: QuotaChecks | None = None,
        *,
        vllm_models: frozenset[str] = frozenset(),
    ) -> None:
        """`vllm_models` are the base models whose samples prefer groups that only sample."""
        self._database = database
        self._limits = limits
        self._vllm_models = vllm_models
        self._without_sampler: set[str] = set()
        """Those that no such group serves now."""
        self._quotas = quotas or QuotaChecks()
        self._secret = secret
        self._worker_wakeup = WakeupSender(database, "worker")
        self._api_wakeup = WakeupSender(database, "api")
        self._placement = Placement([])
        """Chooses among the groups that take work; used in transactions only."""
        self._placement_valid_until = 0.0
        self._placed: deque[tuple[float, str]] = deque(maxlen=MAX_PLACED)
        """Times and groups of the newest models, which the reported load may not include yet."""

    def place_run(self, db: Connection, run_id: str, base_model: str) -> str:
        """Return the group for a new model."""
        group_id = self._current_placement(db).place_run(run_id, base_model) or ""
        self._placed.append((clock.now(), group_id))
        return group_id

    def _place_sample(self, db: Connection, new_job: NewJob) -> str:
        if new_job.base_model is None:
            return ""
        base_model, placement = new_job.base_model, self._current_placement(db)
        source = groups.sample_source(new_job.tenant_id, new_job.sampler_id, base_model)
        prefers_sampler = base_model in self._vllm_models
        if prefers_sampler:
            self._log_availability(base_model, placement.has_sampler(base_model))
        return placement.place_sample(source, base_model, prefers_sampler=prefers_sampler) or ""

    def _log_availability(self, base_model: str, is_available: bool) -> None:
        """Log when the samples of a base model begin or cease to run elsewhere."""
        if is_available == (base_model not in self._without_sampler):
            return
        if is_available:
            self._without_sampler.discard(base_model)
            LOG.info("samples of %s go to vLLM", base_model)
        else:
            self._without_sampler.add(base_model)
            LOG.warning("no worker with vLLM serves %s; its samples go to the others", base_model)

    def _current_placement(self, db: Connection) -> Placement:
        now = time.monotonic()
        if now >= self._placement_valid_until:
            current = groups.list_current(db)
            alive = ready_views(current, alive_since=clock.now() - ALIVE_SECONDS)
            seen_at = {group.id: group.seen_at for group in current}
            num_new = Counter(
                group_id for at, group_id in self._placed if at > seen_at.get(group_id, at)
            )
            # Work for groups that are all restarting is stored for them.
            self._placement = Placement(alive or ready_views(current), num_new)
            self._placement_valid_until = now + GROUPS_CACHE_SECONDS
        return self._placement

    def submit(self, new_job: NewJob, prepare: PrepareJob | None = None) -> Future[JobRecord]:
        """Store a job, or return the one with the same idempotency key.

        `prepare` runs in the same transaction before a new job is stored; an exception in it
        rejects the job.
        """
        job_to_store = replace(new_job, id=new_job.id or self._new_id(new_job.tenant_id))

        def work(db: Connection) -> tuple[JobRecord, bool]:
            before = (
                jobs.find_by_key(db, job_to_store.key) if job_to_store.key is not None else None
            )
            if before is not None:
                return _check_same_request(before, job_to_store), False
            self._check_limits(db, job_to_store)
            if not job_to_store.is_cancelled:
                self._quotas.check_job(db, job_to_store)
            if prepare is not None:
                prepare(db)
            group_id = self._place_sample(db, job_to_store)
            job = jobs.insert(db, replace(job_to_store, group_id=group_id), clock.now())
            return (job, True) if job is not None else (_find_repeated(db, job_to_store), False)

        done: Future[JobRecord] = Future()
        self._database.write_soon(work, _submit_locks(job_to_store)).add_done_callback(
            lambda future: self._resolve_submit(future, done)
        )
        return done

    def _resolve_submit(
        self, written: Future[tuple[JobRecord, bool]], done: Future[JobRecord]
    ) -> None:
        error = written.exception()
        if error is not None:
            done.set_exception(error)
            return
        job, is_new = written.result()
        done.set_result(job)
        if is_new:
            self._worker_wakeup.notify([f"{NUMBER_PREFIX}{job.no}"])

    def _check_limits(self, db: Connection, new_job: NewJob) -> None:
        limits = self._limits
        load = jobs.get_load(db, new_job.tenant_id)
        if load.num_jobs >= limits.max_jobs_per_tenant:
            raise self._rate_limit_error(
                f"{load.num_jobs} of your requests are waiting, which is the limit"
            )
        if load.num_bytes and load.num_bytes + new_job.num_bytes > limits.max_bytes_per_tenant:
            raise self._rate_limit_error(f"{load.num_bytes} bytes of your requests are waiting")
        # Counted only for tenants without open jobs: counting all jobs for every one is slow.
        if load.num_jobs == 0 and jobs.get_load(db).num_jobs >= limits.max_jobs:
            raise self._rate_limit_error("the server's queue is full")

    def _rate_limit_error(self, reason: str) -> RateLimitError:
        seconds = self._limits.retry_after_seconds
        return RateLimitError(f"{reason}; try again in {seconds:g} s", retry_after_seconds=seconds)

    # --- results ---------------------------------------------------------------------------
    def find(self, tenant_id: str, request_id: str) -> JobRecord:
        """Return a job of this tenant; raises 410 if it has expired, 404 if it never existed."""
        job = self._database.read(lambda db: jobs.find(db, request_id))
        return self._check_owner(job, tenant_id, request_id)

    def find_with_result(self, tenant_id: str, request_id: str) -> jobs.JobWithResult:
        """Return a job of this tenant, with its result if it is finished."""
        outcome = self._database.read(lambda db: jobs.find_with_result(db, request_id))
        job = self._check_owner(outcome.job if outcome is not None else None, tenant_id, request_id)
        return outcome if outcome is not None else jobs.JobWithResult(job, None)

    def mark_fetched(self, job_ids: Sequence[str]) -> None:
        """Record that clients have received results, so that these expire sooner."""
        ids, now = list(job_ids), clock.now()
        self._database.write_soon(lambda db: jobs.mark_fetched(db, ids, now), SHARED)

    def list_finished(self, job_ids: Sequence[str]) -> list[str]:
        """Return which of these jobs are finished."""
        return self._database.read(lambda db: jobs.list_finished(db, job_ids))

    def cancel(self, tenant_id: str, request_id: str) -> Future[bool]:
        """Cancel a sample or a pass; returns False for other kinds and for finished jobs.

        A sample is finished at once. A pass is finished when the worker has stopped it, because
        only the worker knows whether the pass has changed the model.
        """

        cancelled: Future[bool] = Future()
        cancelled.add_done_callback(lambda done: self._notify_cancelled(done, request_id))

        def find(db: Connection) -> JobRecord:
            return self._check_owner(jobs.find(db, request_id), tenant_id, request_id)

        def cancel_found(found: Future[JobRecord]) -> None:
            if found.exception() is not None:
                cancelled.set_exception(found.exception())
                return
            job = found.result()
            written = self._database.write_soon(
                partial(cancel_job, job_id=job.id), _cancel_locks(job)
            )
            written.add_done_callback(partial(_copy_result, target=cancelled))

        # First its sampling session and group must be known, which determine the locks.
        self._database.write_soon(find, SHARED).add_done_callback(cancel_found)
        return cancelled

    def _notify_cancelled(self, done: Future[bool], request_id: str) -> None:
        if done.exception() is None and done.result():
            self._worker_wakeup.notify([CANCEL_PREFIX + request_id])
            self._api_wakeup.notify([request_id])

    def wake_worker(self) -> None:
        """Wake the worker even without a new job."""
        self._worker_wakeup.notify()

    def close(self) -> None:
        """Close the sockets."""
        self._worker_wakeup.close()
        self._api_wakeup.close()

    # --- ids -------------------------------------------------------------------------------
    def _new_id(self, tenant_id: str) -> str:
        unique = uuid.uuid4().hex
        return f"{unique}-{self._id_tag(tenant_id, unique)}"

    def _id_tag(self, tenant_id: str, unique: str) -> str:
        text = f"{tenant_id}:{unique}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:_TAG_LENGTH]

    def _check_owner(self, job: JobRecord | None, tenant_id: str, request_id: str) -> JobRecord:
        if job is not None and job.tenant_id == tenant_id:
            return job
        # The tag proves that this tenant was given the id, even after the row is deleted.
        unique, _, tag = request_id.partition("-")
        if job is None and hmac.compare_digest(
            tag.encode(), self._id_tag(tenant_id, unique).encode()
        ):
            raise PromiseExpiredError(
                f"future {request_id!r} has expired; submit the request again"
            )
        raise NotFoundError(f"future {request_id!r} does not exist")


def _cancel_locks(job: JobRecord) -> WriteLocks:
    """Return the locks of a cancellation: those with which a worker finishes the job."""
    if job.kind in PASS_KINDS:
        return lease_locks(group_lease(job.group_id))
    return sampler_locks([job.sampler_id])


def cancel_job(db: Connection, job_id: str) -> bool:
    """Cancel a job; returns False for other kinds than samples and passes, and finished jobs."""
    job, now = jobs.find(db, job_id), clock.now()
    if job is None or job.is_finished:
        return False
    if job.kind in PASS_KINDS:
        return jobs.request_cancel(db, job.id, now)
    if job.kind != JobKind.SAMPLE:
        return False
    ending = jobs.JobEnding(
        job=job,
        error=CANCELLED.message,
        category=CANCELLED.category,
        started_at=job.started_at or now,
        finished_at=now,
    )
    return jobs.finish(db, ending)


def _copy_result(source: Future[bool], target: Future[bool]) -> None:
    error = source.exception()
    if error is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())


def _submit_locks(new_job: NewJob) -> WriteLocks:
    """Return the locks of a submit: exclusive if it counts models or positions before it writes."""
    is_numbered = new_job.run_id is None or new_job.position is not None
    is_creation = new_job.kind in {JobKind.CREATE_MODEL, JobKind.LOAD_WEIGHTS}
    return SHARED if is_numbered and not is_creation else EXCLUSIVE


def _find_repeated(db: Connection, new_job: NewJob) -> JobRecord:
    """Return the job with the same key that another process has stored at the same moment."""
    stored = jobs.find_by_key(db, new_job.key) if new_job.key is not None else None
    if stored is None:
        raise StoreBusy("the same request is being deleted; try again")
    return _check_same_request(stored, new_job)


def _check_same_request(existing: JobRecord, new_job: NewJob) -> JobRecord:
    if existing.tenant_id != new_job.tenant_id:
        raise NotFoundError("the model does not exist")
    if existing.kind != new_job.kind:
        raise BadRequestError(
            f"this sequence number was used for {existing.kind} before, and now for {new_job.kind}"
        )
    return existing
