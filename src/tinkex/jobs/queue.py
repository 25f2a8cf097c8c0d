"""The door to the queue: promises are made, asked about and cancelled here.

A promise is committed before its id leaves this room; the same key always gets the same promise.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeAlias

from tinkex import clock
from tinkex.errors import (
    BadRequestError,
    NotFoundError,
    PromiseExpiredError,
    RateLimitError,
)
from tinkex.jobs.bells import Ringer
from tinkex.jobs.kinds import PASSES, Kind
from tinkex.jobs.outcomes import CANCELLED
from tinkex.jobs.quotas import QuotaChecks
from tinkex.store import jobs
from tinkex.store.database import Connection, Database
from tinkex.store.records import Job, NewJob

Prepare: TypeAlias = Callable[[Connection], None]
_TAG_LENGTH = 12
#: Before a job id, this tells the worker to stop it.
CANCEL_MARK = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How much may wait."""

    max_jobs_per_tenant: int = 4096
    """Promises of one tenant that are not over."""
    max_bytes_per_tenant: int = 1 << 30
    """Payload bytes of one tenant's promises that are not over."""
    max_jobs: int = 65_536
    """Promises of everybody that are not over."""
    retry_after_seconds: float = 1.0
    """When a client that was told to wait should come again."""


class JobQueue:
    """The promises of one store."""

    def __init__(
        self,
        database: Database,
        limits: QueueLimits,
        secret: bytes,
        quotas: QuotaChecks | None = None,
    ) -> None:
        self._database = database
        self._limits = limits
        self._quotas = quotas or QuotaChecks()
        self._secret = secret
        self._worker = Ringer(database, "worker")
        self._waiting = Ringer(database, "api")

    def submit(self, new: NewJob, prepare: Prepare | None = None) -> Future[Job]:
        """Make a promise, or find the one that was made for the same key before.

        `prepare` runs in the same transaction, before a new promise is stored; what it raises
        refuses the promise.
        """
        named = replace(new, id=new.id or self._new_id(new.tenant_id))

        def work(db: Connection) -> tuple[Job, bool]:
            before = jobs.by_key(db, named.key) if named.key is not None else None
            if before is not None:
                return _same(before, named), False
            self._check_room(db, named)
            if not named.is_cancelled:
                self._quotas.admit(db, named)
            if prepare is not None:
                prepare(db)
            job = jobs.insert(db, named, clock.now())
            assert job is not None  # writers take turns, so nobody came between
            return job, True

        done: Future[Job] = Future()
        self._database.write_soon(work).add_done_callback(lambda future: self._tell(future, done))
        return done

    def _tell(self, written: Future[tuple[Job, bool]], done: Future[Job]) -> None:
        error = written.exception()
        if error is not None:
            done.set_exception(error)
            return
        job, is_new = written.result()
        done.set_result(job)
        if is_new:
            self._worker.ring()

    def _check_room(self, db: Connection, new: NewJob) -> None:
        limits = self._limits
        load = jobs.load_of(db, new.tenant_id)
        if load.num_jobs >= limits.max_jobs_per_tenant:
            raise self._refusal(f"{load.num_jobs} of your requests are waiting, which is the limit")
        if load.num_bytes and load.num_bytes + len(new.payload) > limits.max_bytes_per_tenant:
            raise self._refusal(f"{load.num_bytes} bytes of your requests are waiting")
        # The common road asks only about one tenant; everybody together is the rare case.
        if load.num_jobs == 0 and jobs.load_of(db).num_jobs >= limits.max_jobs:
            raise self._refusal("the server's queue is full")

    def _refusal(self, reason: str) -> RateLimitError:
        seconds = self._limits.retry_after_seconds
        return RateLimitError(f"{reason}; try again in {seconds:g} s", retry_after_seconds=seconds)

    # --- what came of it -------------------------------------------------------------------
    def find(self, tenant_id: str, request_id: str) -> Job:
        """A promise of this tenant; 410 if it was forgotten, 404 if it never was."""
        job = self._database.read(lambda db: jobs.find(db, request_id))
        return self._owned(job, tenant_id, request_id)

    def outcome(self, tenant_id: str, request_id: str) -> jobs.Outcome:
        """A promise of this tenant with its result, if it is over."""
        found = self._database.read(lambda db: jobs.outcome(db, request_id))
        job = self._owned(found.job if found is not None else None, tenant_id, request_id)
        return found if found is not None else jobs.Outcome(job, None)

    def mark_fetched(self, job_ids: Sequence[str]) -> None:
        """Note that results reached their clients, so that they need not be kept for long."""
        ids, now = list(job_ids), clock.now()
        self._database.write_soon(lambda db: jobs.mark_fetched(db, ids, now))

    def finished_among(self, job_ids: Sequence[str]) -> list[str]:
        """Which of these promises are over."""
        return self._database.read(lambda db: jobs.finished_among(db, job_ids))

    def cancel(self, tenant_id: str, request_id: str) -> Future[bool]:
        """Cancel a sample or a pass; other work, and what is over, stays as it is. True if it did.

        A sample is over at once. A pass is over when the worker has stopped it, which alone knows
        whether the pass has changed the model.
        """

        def work(db: Connection) -> bool:
            job = self._owned(jobs.find(db, request_id), tenant_id, request_id)
            if job.is_over:
                return False
            now = clock.now()
            if job.kind in PASSES:
                return jobs.request_cancel(db, job.id, now)
            if job.kind != Kind.SAMPLE:
                return False
            return jobs.finish(
                db,
                jobs.Ending(
                    job=job,
                    error=CANCELLED.message,
                    category=CANCELLED.category,
                    started_at=job.started_at or now,
                    finished_at=now,
                ),
            )

        future = self._database.write_soon(work)
        future.add_done_callback(lambda done: self._tell_cancelled(done, request_id))
        return future

    def _tell_cancelled(self, done: Future[bool], request_id: str) -> None:
        if done.exception() is None and done.result():
            self._worker.ring([CANCEL_MARK + request_id])
            self._waiting.ring([request_id])

    def wake_worker(self) -> None:
        """Have the worker look for what it should do, jobs or not."""
        self._worker.ring()

    def close(self) -> None:
        """Give back what is held."""
        self._worker.close()
        self._waiting.close()

    # --- ids -------------------------------------------------------------------------------
    def _new_id(self, tenant_id: str) -> str:
        unique = uuid.uuid4().hex
        return f"{unique}-{self._tag(tenant_id, unique)}"

    def _tag(self, tenant_id: str, unique: str) -> str:
        text = f"{tenant_id}:{unique}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:_TAG_LENGTH]

    def _owned(self, job: Job | None, tenant_id: str, request_id: str) -> Job:
        if job is not None and job.tenant_id == tenant_id:
            return job
        # The tag says whether this tenant was ever given the id, long after the row is gone.
        unique, _, tag = request_id.partition("-")
        if job is None and hmac.compare_digest(tag.encode(), self._tag(tenant_id, unique).encode()):
            raise PromiseExpiredError(f"promise {request_id!r} has expired; submit the work again")
        raise NotFoundError(f"there is no promise {request_id!r}")


def _same(before: Job, new: NewJob) -> Job:
    if before.tenant_id != new.tenant_id:
        raise NotFoundError("there is no such model")
    if before.kind != new.kind:
        raise BadRequestError(
            f"this sequence number was used for {before.kind} before, and now for {new.kind}"
        )
    return before
