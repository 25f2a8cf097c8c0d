"""Store queries of the pages about tenants: API keys, usage and quotas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tinkex.errors import NotFoundError
from tinkex.ids import is_label
from tinkex.jobs.quotas import QuotaChecks, QuotaUse
from tinkex.server.dashboard.administration import is_operator
from tinkex.store import keys, usage_sums
from tinkex.store.database import Connection
from tinkex.store.quotas import Quotas
from tinkex.store.records import ApiKeyRecord, TenantRecord

#: Rows of each table; a search shows the others.
MAX_TENANTS = 100
MAX_KEYS = 500
DAY_SECONDS = 86_400.0
NUM_DAYS = 14
MAX_SEARCH_CHARS = 200

USAGE_KINDS: Mapping[str, str] = {
    "training": "Trained",
    "prefill": "Prompt",
    "prefill_cached": "Cached prompt",
    "sample": "Sampled",
    "checkpoint": "Checkpoints",
}
"""The columns of usage tables by kind; all but the last count tokens."""
TOKEN_KINDS = tuple(kind for kind in USAGE_KINDS if kind != "checkpoint")
QUOTA_LABELS: Mapping[str, str] = {
    "models": "Models",
    "checkpoints": "Checkpoints",
    "stored_bytes": "Stored bytes",
    "tokens_per_hour": "Tokens per hour",
    "sessions_per_hour": "Sessions per hour",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """An API key with its tenant."""

    key: ApiKeyRecord
    tenant: TenantRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysPage:
    """The data of the page of API keys."""

    is_operator: bool
    rows: Sequence[KeyRow]
    tenants: Sequence[TenantRecord]
    num_tenants: int
    search: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DayRow:
    """The usage of one day."""

    date: str
    amounts: Mapping[str, int]

    @property
    def num_tokens(self) -> int:
        """Tokens of all kinds."""
        return sum(self.amounts.get(kind, 0) for kind in TOKEN_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """A tenant as a row of the operator's table of usage."""

    tenant: TenantRecord
    amounts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePage:
    """The data of the page of usage and quotas."""

    is_operator: bool
    tenant: TenantRecord
    """The tenant whose usage is shown in detail."""
    days: Sequence[DayRow]
    quotas: Sequence[QuotaUse]
    own_limits: Mapping[str, int]
    """Quotas that are set for this tenant; the others follow the server's settings."""
    default_limits: Mapping[str, int]
    tenants: Sequence[TenantRow]
    num_tenants: int
    search: str
    usage_kinds: Mapping[str, str] = field(default_factory=lambda: USAGE_KINDS)
    quota_labels: Mapping[str, str] = field(default_factory=lambda: QUOTA_LABELS)

    @property
    def max_day_tokens(self) -> int:
        """The tokens of the busiest day; at least 1."""
        return max((day.num_tokens for day in self.days), default=0) or 1


def read_keys(db: Connection, tenant: TenantRecord, search: str = "") -> KeysPage:
    """Read the keys of all tenants for the operator, and a tenant's own keys for others."""
    search = _clean(search)
    if is_operator(tenant):
        found, num_tenants = keys.list_tenants(db, search, MAX_TENANTS)
    else:
        found, num_tenants = [tenant], 1
    by_id = {each.id: each for each in found}
    records = keys.list_keys_of(db, list(by_id), MAX_KEYS)
    return KeysPage(
        is_operator=is_operator(tenant),
        rows=[KeyRow(key=key, tenant=by_id[key.tenant_id]) for key in records],
        tenants=found,
        num_tenants=num_tenants,
        search=search,
    )


def read_usage(
    db: Connection,
    visitor: TenantRecord,
    checks: QuotaChecks,
    now: float,
    tenant_name: str = "",
    search: str = "",
) -> UsagePage:
    """Read the usage of a tenant; only the operator can name another one."""
    shown = _find_shown(db, visitor, tenant_name)
    since = (now // DAY_SECONDS - NUM_DAYS + 1) * DAY_SECONDS
    search = _clean(search)
    tenants: list[TenantRecord] = []
    num_tenants = 0
    if is_operator(visitor):
        tenants, num_tenants = keys.list_tenants(db, search, MAX_TENANTS)
    sums = usage_sums.sum_by_tenant(db, [each.id for each in tenants], since)
    return UsagePage(
        is_operator=is_operator(visitor),
        tenant=shown,
        days=_days(usage_sums.sum_by_day(db, shown.id, since)),
        quotas=checks.list_usage(db, shown.id, now),
        own_limits=dict(shown.quotas or {}),
        default_limits={name: getattr(checks.defaults, name) for name in Quotas.names()},
        tenants=[TenantRow(tenant=each, amounts=sums[each.id]) for each in tenants],
        num_tenants=num_tenants,
        search=search,
    )


def _clean(search: str) -> str:
    """A search text without characters that no name has, such as NUL, which PostgreSQL rejects."""
    return "".join(filter(str.isprintable, search[:MAX_SEARCH_CHARS]))


def _find_shown(db: Connection, visitor: TenantRecord, tenant_name: str) -> TenantRecord:
    if not tenant_name or tenant_name == visitor.name:
        return visitor
    can_look = is_operator(visitor) and is_label(tenant_name)
    found = keys.find_tenant_by_name(db, tenant_name) if can_look else None
    if found is None:
        # The same message as for others' tenants, so that names do not leak.
        raise NotFoundError(f"no tenant is named {tenant_name!r:.200}")
    return found


def _days(sums: Sequence[usage_sums.DayUsage]) -> list[DayRow]:
    """The days with usage, newest first."""
    amounts: dict[int, dict[str, int]] = {}
    for each in sums:
        amounts.setdefault(each.day, {})[each.kind] = each.amount
    return [
        DayRow(date=_format_day(day), amounts=amounts[day]) for day in sorted(amounts, reverse=True)
    ]


def _format_day(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_SECONDS, UTC).date().isoformat()
