"""A small memory that forgets: bounded in size, and every entry for a limited time."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from tinkex.checkpoint.verification import VerifiedCheckpoints
from tinkex.engine.protocol import BaseModel
from tinkex.home import Home
from tinkex.jobs.future_waiters import FutureWaiters
from tinkex.jobs.queue import JobQueue
from tinkex.jobs.quotas import QuotaChecks
from tinkex.server.config import ServerConfig
from tinkex.store.database import Database

K = TypeVar("K")
V = TypeVar("V")


class TTLCache(Generic[K, V]):
    """What was found out lately; belongs to one event loop."""

    def __init__(self, *, max_entries: int, ttl_seconds: float) -> None:
        self._max_entries = max_entries
        self.ttl_seconds = ttl_seconds
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, now: float | None = None) -> V | None:
        """What is remembered of a key, unless it is too old."""
        found = self._entries.get(key)
        if found is None:
            return None
        until, value = found
        if until <= (time.monotonic() if now is None else now):
            self._entries.pop(key, None)
            return None
        return value

    def put(self, key: K, value: V, now: float | None = None) -> None:
        """Remember something; the oldest entry makes room."""
        now = time.monotonic() if now is None else now
        self._entries.pop(key, None)
        self._entries[key] = (now + self.ttl_seconds, value)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


#: Requests of one tenant that an API process works on at the same time. More would only wait for
#: the same few threads and the same writer, ahead of other tenants' requests.
MAX_ACTIVE_REQUESTS = 8


class TenantSlots:
    """One semaphore per tenant with active requests."""

    def __init__(self, max_active: int = MAX_ACTIVE_REQUESTS) -> None:
        self._max_active = max_active
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def semaphore_for(self, tenant_id: str) -> asyncio.Semaphore:
        """The tenant's semaphore; it lives as long as a request holds it or waits for it."""
        semaphore = self._semaphores.get(tenant_id)
        if semaphore is None:
            semaphore = self._semaphores[tenant_id] = asyncio.Semaphore(self._max_active)
        return semaphore


RequestT = TypeVar("RequestT")
T = TypeVar("T")
P = ParamSpec("P")

#: A key that was revoked is refused after this at the latest.
ACCEPTED_KEY_TTL_SECONDS = 1.5
#: Of an idempotency key.
MAX_IDEMPOTENCY_KEY_CHARS = 255
#: A key that is made while somebody tries it is accepted after this at the latest.
REJECTED_KEY_TTL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerIdentity:
    """Who asks."""

    tenant_id: str
    key_id: int
    expires_at: float | None = None
    """When the credential ends; None for a key, which has no end."""

    @property
    def urn(self) -> str:
        """How the tenant is called in answers."""
        return f"tml:user:{self.tenant_id}"


ANONYMOUS = CallerIdentity(tenant_id="", key_id=0)
"""Who asks where no key is needed."""


@dataclass(slots=True)
class ProcessCache:
    """What an API process remembers between requests."""

    identities: TTLCache[str, CallerIdentity] = field(
        default_factory=lambda: TTLCache(max_entries=4096, ttl_seconds=ACCEPTED_KEY_TTL_SECONDS)
    )
    """Whose a credential is, by its digest."""
    rejections: TTLCache[str, str] = field(
        default_factory=lambda: TTLCache(max_entries=1024, ttl_seconds=REJECTED_KEY_TTL_SECONDS)
    )
    """Why a credential was refused, by its digest; apart, so that a flood evicts nobody."""
    pause_reasons: TTLCache[str, str] = field(
        default_factory=lambda: TTLCache(max_entries=1024, ttl_seconds=1.0)
    )
    """Why a tenant's work does not go on, by tenant; empty if it does."""
    base_models: TTLCache[tuple[str, str], BaseModel] = field(
        default_factory=lambda: TTLCache(max_entries=4096, ttl_seconds=5.0)
    )
    """The base model of a run or a sampling session, by tenant and id."""
    fetched_job_ids: set[str] = field(default_factory=set)
    """Promises whose results were sent to their clients, not yet noted in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What handlers work with; an API process has one."""

    config: ServerConfig
    home: Home
    database: Database
    queue: JobQueue
    waiters: FutureWaiters
    quotas: QuotaChecks = field(default_factory=QuotaChecks)
    secret: bytes
    """Signs tokens and download URLs; all processes of a store share it."""
    cache: ProcessCache = field(default_factory=lambda: ProcessCache())
    """What this process remembers between requests; nothing is lost with it."""
    tenant_slots: TenantSlots = field(default_factory=TenantSlots)
    """Limits how many requests of one tenant this process works on at the same time."""
    verified_checkpoints: VerifiedCheckpoints = field(default_factory=VerifiedCheckpoints)
    """Checkpoints whose files this process has compared with their manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext(Generic[RequestT]):
    """A request that was authenticated and decoded."""

    endpoint: str
    """The row's name in the endpoint table."""
    identity: CallerIdentity
    """Who asks; endpoints that need no key see an empty one."""
    request: RequestT
    """The decoded message. For forward_backward it is a ForwardRequest where the client asks for
    the first half alone."""
    body: bytes = b""
    """The message's own bytes, unpacked."""
    is_proto: bool = False
    """Whether the body is protobuf."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """What stood in the path, checked and unquoted."""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    """By lower-case name."""
    base_url: str = ""
    """How the client reached this server, for links that lead back to it."""

    @property
    def idempotency_key(self) -> str:
        """The idempotency key, if there is one; what is beyond its limit makes no difference."""
        return self.headers.get("x-idempotency-key", "")[:MAX_IDEMPOTENCY_KEY_CHARS]

    @property
    def tenant_id(self) -> str:
        """Whose request it is."""
        return self.identity.tenant_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RawResponse:
    """An answer that is more than a message with status 200."""

    status: int = 200
    body: bytes = b"{}"
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Reply: TypeAlias = Any
"""An `Answer`, or a struct or mapping that is answered as JSON with status 200."""
Handler: TypeAlias = Callable[[Services, RequestContext[Any]], Awaitable[Reply]]


async def run_in_thread(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run what blocks, such as a question to the database, without holding up the loop."""
    return await asyncio.to_thread(function, *args, **options)
