"""What endpoint handlers work with: services, caches, the request context and raw responses."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from tinkex.checkpoint.storage import FileStorage
from tinkex.engine.protocol import BaseModel
from tinkex.home import Home
from tinkex.jobs.future_waiters import FutureWaiters
from tinkex.jobs.queue import JobQueue
from tinkex.jobs.quotas import QuotaChecks
from tinkex.jobs.token_streams import TokenStreams
from tinkex.server.config import ServerConfig
from tinkex.store.database import Database
from tinkex.text import Tokenizer

K = TypeVar("K")
V = TypeVar("V")


class TTLCache(Generic[K, V]):
    """A bounded cache whose entries expire; for use on one event loop only."""

    def __init__(self, *, max_entries: int, ttl_seconds: float) -> None:
        self._max_entries = max_entries
        self.ttl_seconds = ttl_seconds
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, now: float | None = None) -> V | None:
        """Return a cached value, or None if there is none or it has expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        expires_at, value = entry
        if expires_at <= (time.monotonic() if now is None else now):
            self._entries.pop(key, None)
            return None
        return value

    def put(self, key: K, value: V, now: float | None = None) -> None:
        """Cache a value; evicts the oldest entry if the cache is full."""
        now = time.monotonic() if now is None else now
        self._entries.pop(key, None)
        self._entries[key] = (now + self.ttl_seconds, value)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()


#: Requests of one tenant that an API process handles concurrently. More would only wait for the
#: same few threads and the same writer, ahead of other tenants' requests.
MAX_ACTIVE_REQUESTS = 8


class TenantSlots:
    """One semaphore per tenant with active requests."""

    def __init__(self, max_active: int = MAX_ACTIVE_REQUESTS) -> None:
        self._max_active = max_active
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def semaphore_for(self, tenant_id: str) -> asyncio.Semaphore:
        """The tenant's semaphore; it exists while a request holds it or waits for it."""
        semaphore = self._semaphores.get(tenant_id)
        if semaphore is None:
            semaphore = self._semaphores[tenant_id] = asyncio.Semaphore(self._max_active)
        return semaphore


RequestT_co = TypeVar("RequestT_co", covariant=True)
T = TypeVar("T")
P = ParamSpec("P")

#: Threads that tokenize and render prompts, of all tenants together.
MAX_TEXT_THREADS = 4
#: Checks of JSON schemas that run at once, each in a process of its own.
MAX_SCHEMA_THREADS = 2


class TenantThreads:
    """Threads for work that can take seconds; a tenant uses one at a time."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._tenant_slots = TenantSlots(max_active=1)
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, tenant_id: str, function: Callable[[], T]) -> T:
        """Run a function when no other one of this tenant runs."""
        loop, semaphore = asyncio.get_running_loop(), self._tenant_slots.semaphore_for(tenant_id)
        await semaphore.acquire()
        work = self._executor.submit(function)
        # Not when the caller is cancelled: a running function cannot be stopped.
        work.add_done_callback(lambda _: _call_on_loop(loop, semaphore.release))
        return await asyncio.wrap_future(work)


def _call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function)


#: A revoked key is rejected after this time at the latest.
ACCEPTED_KEY_TTL_SECONDS = 1.5
#: A new key that was tried before it existed is accepted after this time at the latest.
REJECTED_KEY_TTL_SECONDS = 0.5
MAX_IDEMPOTENCY_KEY_CHARS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerIdentity:
    """The tenant and the API key of a caller."""

    tenant_id: str
    key_id: int
    expires_at: float | None = None
    """Expiry of a token; None for an API key, which does not expire."""

    @property
    def urn(self) -> str:
        """The tenant's name in responses."""
        return f"tml:user:{self.tenant_id}"


ANONYMOUS = CallerIdentity(tenant_id="", key_id=0)
"""The caller of a public endpoint."""


@dataclass(slots=True)
class ProcessCache:
    """Caches of an API process."""

    identities: TTLCache[str, CallerIdentity] = field(
        default_factory=lambda: TTLCache(max_entries=4096, ttl_seconds=ACCEPTED_KEY_TTL_SECONDS)
    )
    """The owner of a credential, by its digest."""
    rejections: TTLCache[str, str] = field(
        default_factory=lambda: TTLCache(max_entries=1024, ttl_seconds=REJECTED_KEY_TTL_SECONDS)
    )
    """Errors of rejected credentials, by digest; separate, so that a flood evicts no identity."""
    pause_reasons: TTLCache[str, str] = field(
        default_factory=lambda: TTLCache(max_entries=1024, ttl_seconds=1.0)
    )
    """Why a tenant's jobs are paused, by tenant; empty if they are not."""
    base_models: TTLCache[tuple[str, str], BaseModel] = field(
        default_factory=lambda: TTLCache(max_entries=4096, ttl_seconds=5.0)
    )
    """The base model of a run or a sampling session, by tenant and id."""
    fetched_job_ids: set[str] = field(default_factory=set)
    """Jobs whose results were sent to clients, not yet recorded in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Shared dependencies of endpoint handlers; one instance per API process."""

    config: ServerConfig
    home: Home
    storage: FileStorage
    database: Database
    queue: JobQueue
    waiters: FutureWaiters
    token_streams: TokenStreams
    process_id: str = ""
    """Identifies this API process in the store; empty if it is not registered there."""
    quotas: QuotaChecks = field(default_factory=QuotaChecks)
    secret: bytes
    """Key for signing tokens and download URLs; all processes of a store share it."""
    cache: ProcessCache = field(default_factory=lambda: ProcessCache())
    """Caches of this process; they can be dropped at any time."""
    tenant_slots: TenantSlots = field(default_factory=TenantSlots)
    """Limits the concurrent requests of one tenant in this process."""
    text_threads: TenantThreads = field(
        default_factory=lambda: TenantThreads(MAX_TEXT_THREADS, "text")
    )
    """Tokenizing and rendering."""
    schema_threads: TenantThreads = field(
        default_factory=lambda: TenantThreads(MAX_SCHEMA_THREADS, "schemas")
    )
    """Checks of JSON schemas; separate, so that slow ones do not delay prompts."""
    load_tokenizer: Callable[[BaseModel], Tokenizer]
    """Loads the tokenizer of a base model, once; blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext(Generic[RequestT_co]):
    """An authenticated and decoded request."""

    endpoint: str
    """The name of the endpoint."""
    identity: CallerIdentity
    """The caller; ANONYMOUS for public endpoints."""
    request: RequestT_co
    """The decoded message. For forward_backward it is a ForwardRequest if the client requests only
    the forward pass."""
    body: bytes = b""
    """The encoded message, decompressed."""
    is_proto: bool = False
    """Whether the body is protobuf."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """Ids from the path, validated and unquoted."""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers by lower-case name."""
    base_url: str = ""
    """The server's URL as the client used it, for links in responses."""

    @property
    def idempotency_key(self) -> str:
        """The idempotency key, cut to the maximum length; empty if there is none."""
        return self.headers.get("x-idempotency-key", "")[:MAX_IDEMPOTENCY_KEY_CHARS]

    @property
    def tenant_id(self) -> str:
        """The caller's tenant."""
        return self.identity.tenant_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RawResponse:
    """A response with its own status, content type or headers."""

    status: int = 200
    body: bytes = b"{}"
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Reply: TypeAlias = object
"""A `RawResponse`, or a struct or mapping that is sent as JSON with status 200."""
Handler: TypeAlias = Callable[[Services, RequestContext[Any]], Awaitable[Reply]]


async def run_in_thread(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run a blocking function, such as a database query, without blocking the event loop."""
    return await asyncio.to_thread(function, *args, **options)
