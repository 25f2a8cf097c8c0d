"""Quota checks of tenants, run in the transaction that stores the checked object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tinkex import clock
from tinkex.display import format_count
from tinkex.errors import PermissionDeniedError, RateLimitError
from tinkex.ids import TinkerPath
from tinkex.jobs.job_types import JobKind
from tinkex.store import quotas, runs
from tinkex.store.accounting import HOUR_SECONDS
from tinkex.store.database import Connection
from tinkex.store.quotas import Quotas
from tinkex.store.records import NewJob

_ASK_OPERATOR = "or ask the operator of the server to raise the quota"
_FINISH_SESSIONS = (
    f"finish sessions that are no longer needed with `tinkex session finish`, {_ASK_OPERATOR}"
)
_DELETE_CHECKPOINTS = f"delete checkpoints with `tinkex checkpoint delete`, {_ASK_OPERATOR}"
#: Retry-After when a tenant's open requests may use up the rest of its tokens.
_OPEN_RETRY_SECONDS = 2.0


class QuotaExceeded(PermissionDeniedError):
    """HTTP 403: a quota is used up until the tenant frees something; clients do not retry."""


class QuotaUse(NamedTuple):
    """Usage of one quota."""

    name: str
    used: int
    limit: int
    """0 means unlimited."""


@dataclass(frozen=True, slots=True)
class QuotaChecks:
    """Checks the quotas of tenants; the defaults apply to tenants without their own."""

    defaults: Quotas = field(default_factory=Quotas)

    def check_job(self, db: Connection, new_job: NewJob) -> None:
        """Refuse a job that exceeds the quota of models or tokens."""
        allowed = quotas.get_quotas(db, new_job.tenant_id, self.defaults)
        if allowed.models and _is_model_creation(db, new_job):
            used = quotas.count_models(db, new_job.tenant_id)
            if used >= allowed.models:
                raise _quota_exceeded(
                    f"{used} of {format_count(allowed.models, 'model')}", "models", _FINISH_SESSIONS
                )
        if allowed.tokens_per_hour and new_job.num_tokens:
            _check_tokens(db, new_job, allowed.tokens_per_hour, clock.now())

    def check_checkpoint(
        self, db: Connection, tenant_id: str, path: TinkerPath | None, num_bytes: int = 0
    ) -> None:
        """Refuse a checkpoint that exceeds a quota; one that is replaced at `path` does not count.

        Unnamed sampler weights have no path: only their bytes count, not their number.
        """
        allowed = quotas.get_quotas(db, tenant_id, self.defaults)
        if not allowed.checkpoints and not allowed.stored_bytes:
            return
        stored = quotas.sum_stored(db, tenant_id, clock.now(), path)
        limit = allowed.checkpoints
        if path is not None and limit and stored.num_checkpoints >= limit:
            usage = f"{stored.num_checkpoints:,} of {format_count(limit, 'checkpoint')}"
            raise _quota_exceeded(usage, "checkpoints", _DELETE_CHECKPOINTS)
        limit = allowed.stored_bytes
        if limit and stored.num_bytes + max(1, num_bytes) > limit:
            usage = f"{stored.num_bytes:,} of {format_count(limit, 'byte')} of checkpoints"
            more = f", and this one has {num_bytes:,}" if num_bytes else ""
            raise _quota_exceeded(usage + more, "stored_bytes", _DELETE_CHECKPOINTS)

    def check_session(self, db: Connection, tenant_id: str, now: float) -> None:
        """Refuse a session that exceeds the quota of sessions per hour."""
        limit = quotas.get_quotas(db, tenant_id, self.defaults).sessions_per_hour
        if not limit:
            return
        used = quotas.count_sessions_this_hour(db, tenant_id, now)
        if used >= limit:
            seconds = HOUR_SECONDS - now % HOUR_SECONDS
            raise RateLimitError(
                f"quota exceeded: {used:,} of {limit:,} sessions of this hour are created (quota "
                f"'sessions_per_hour'); use one session for more work, try again in "
                f"{seconds:.0f} s, {_ASK_OPERATOR}",
                retry_after_seconds=seconds,
            )

    def list_usage(self, db: Connection, tenant_id: str, now: float) -> list[QuotaUse]:
        """Return a tenant's usage of each quota."""
        allowed = quotas.get_quotas(db, tenant_id, self.defaults)
        stored = quotas.sum_stored(db, tenant_id, now)
        used = {
            "models": quotas.count_models(db, tenant_id),
            "checkpoints": stored.num_checkpoints,
            "stored_bytes": stored.num_bytes,
            "tokens_per_hour": quotas.count_tokens_this_hour(db, tenant_id, now),
            "sessions_per_hour": quotas.count_sessions_this_hour(db, tenant_id, now),
        }
        return [QuotaUse(name, used[name], getattr(allowed, name)) for name in Quotas.names()]


def _is_model_creation(db: Connection, new_job: NewJob) -> bool:
    if new_job.kind == JobKind.CREATE_MODEL:
        return True
    # Loading weights as the first operation creates the model, too.
    is_first = (
        new_job.kind == JobKind.LOAD_WEIGHTS
        and new_job.position == 0
        and new_job.run_id is not None
    )
    return is_first and runs.find(db, new_job.run_id or "") is None


def _check_tokens(db: Connection, new_job: NewJob, limit: int, now: float) -> None:
    """Refuse more tokens than are left in this hour; open requests count as used.

    Without open requests, a request larger than the rest is admitted: if it were larger than the
    quota, it would wait for ever.
    """
    used = quotas.count_tokens_this_hour(db, new_job.tenant_id, now)
    if used >= limit:
        seconds = HOUR_SECONDS - now % HOUR_SECONDS
        raise RateLimitError(
            f"quota exceeded: {used:,} of {limit:,} tokens of this hour are used (quota "
            f"'tokens_per_hour'); try again in {seconds:.0f} s, {_ASK_OPERATOR}",
            retry_after_seconds=seconds,
        )
    waiting = quotas.count_open_tokens(db, new_job.tenant_id)
    if waiting and used + waiting + new_job.num_tokens > limit:
        raise RateLimitError(
            f"quota exceeded: {used:,} of {limit:,} tokens of this hour are used, and your open "
            f"requests may use {waiting:,} more (quota 'tokens_per_hour'); try again in "
            f"{_OPEN_RETRY_SECONDS:g} s, {_ASK_OPERATOR}",
            retry_after_seconds=_OPEN_RETRY_SECONDS,
        )


def _quota_exceeded(used: str, name: str, remedy: str) -> QuotaExceeded:
    return QuotaExceeded(f"quota exceeded: {used} are in use (quota {name!r}); {remedy}")
