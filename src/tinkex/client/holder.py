"""What all clients made by one ServiceClient share: connection, session, flags and counters."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tinkex import types
from tinkex.client.budget import ByteBudget
from tinkex.client.config import Config
from tinkex.client.credentials import TokenSource, find_credential
from tinkex.client.future import APIFuture
from tinkex.client.hooks import HookThread
from tinkex.client.http import HttpClient, HttpTransport
from tinkex.client.lanes import Lane, lane_for
from tinkex.client.loop import IO
from tinkex.client.queue_state import QueueState, QueueStateObserver, QueueWatch
from tinkex.client.retry import NO_RETRY
from tinkex.client.session import Heartbeat, create_session, finish_session
from tinkex.client.telemetry import Telemetry
from tinkex.client.timings import Metrics, QueueChanged, Timing
from tinkex.client.transport import WIRE_VERSION, Transport, outgoing
from tinkex.errors import APIStatusError, ClientClosed, ConfigError, TinkexError, Verdict
from tinkex.ids import path_segment
from tinkex.logs import get_logger
from tinkex.settings import HOSTED_BASE_URL, HOSTED_CONSOLE_URL
from tinkex.wire.endpoints import AUTH_TOKEN, CLIENT_CONFIG, DYNAMIC_CONFIG

T = TypeVar("T")
logger = get_logger(__name__)
#: How long closing waits for stopped work to end.
STOP_SECONDS = 1.0
FinishStatus = Literal["success", "errored", "interrupted"]


@dataclass(slots=True)
class SessionPlan:
    """How the session is created, or which existing one is joined."""

    user_metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    joined_session_id: str | None = None


@dataclass(slots=True)
class LastToken:
    """The newest token; the pulse reads it without keeping its owner alive."""

    value: str | None = None
    renew: weakref.WeakMethod[Callable[[], None]] | None = None

    async def get(self) -> str | None:
        """What was used last; asks for a fresh one, for the beats of a client that is idle."""
        renew = self.renew() if self.renew is not None else None
        if renew is not None:
            IO.post(renew)
        return self.value


class Holder:
    """Shared state of one tree of clients. Requests run on the I/O loop."""

    def __init__(
        self,
        config: Config,
        plan: SessionPlan | None = None,
        transport: HttpTransport | None = None,
    ) -> None:
        self.config = config
        self.plan = plan or SessionPlan()
        env = config.environment
        explicit = None if config.api_key == env.api_key else config.api_key
        self.credential = find_credential(explicit, env)
        self._check_credential()
        http = HttpClient(config, transport)
        source = self.credential.source if self.credential else ""
        self.transport = Transport(config, http, self._current_credential, source)
        self.transport.on_request_done = self._emit
        # The pulse has a transport of its own and never waits for a token.
        self._last_token = LastToken()
        self.pulse = Transport(config, http, self._last_token.get, source)
        self.pulse.stopwatch = self.transport.stopwatch
        self.flags = types.ClientConfigResponse()
        self.dynamic_flags = types.ClientDynamicConfigResponse()
        self.lane: Lane = lane_for(config, self._lane_key())
        self.response_budget = ByteBudget(self.flags.inflight_response_bytes_semaphore_size)
        self.dispatch_budget = ByteBudget(self.flags.fwdbwd_dispatch_bytes_semaphore_size)
        self.telemetry = Telemetry(self.transport, self._secrets) if config.telemetry else None
        self._tokens: TokenSource | None = None
        self._model_seq_ids = itertools.count()
        self._sampling_seq_ids = itertools.count()
        self._custom_loss_seq_ids = itertools.count()
        self._start: asyncio.Task[None] | None = None
        self._session: asyncio.Task[str] | None = None
        self._heartbeat: Heartbeat | None = None
        self._dynamic_flags_at: float | None = None
        self._hooks = HookThread()
        self._under_way: set[asyncio.Task[Any]] = set()
        self.is_closed = False
        self.has_exported_handle = False
        #: Whether the server takes protobuf; None until a batch has been sent.
        self.speaks_proto: bool | None = None
        #: Whether the server said that chunks of one call may arrive in any order.
        self.sorts_chunks = False
        _OPEN.add(self)

    # --- running work -------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, T]) -> APIFuture[T]:
        """Run work on the I/O loop, unless this client is closed."""
        if self.is_closed:
            work.close()
            raise ClientClosed("This client is closed")
        future: APIFuture[T] = APIFuture()
        IO.post(self._launch, work, future)
        return future

    def _launch(self, work: Coroutine[Any, Any, T], future: APIFuture[T]) -> None:
        if future.cancelled():
            work.close()
            return
        future.follow(self.task(work), asyncio.get_running_loop())

    def task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task on the I/O loop that closing this client stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        if self.is_closed:
            task.cancel()
        return task

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work and wait for it; refused on the I/O thread, which would wait for itself."""
        if IO.is_current():
            work.close()
            raise ClientClosed("A blocking call was made on the I/O thread; await instead")
        return self.start(work).result()

    def watch(self, observer: QueueStateObserver, name: str) -> QueueWatch:
        """A watch that tells the observer, and the event hook, about queue changes."""
        return QueueWatch(observer, self._hooks.run, lambda s, r: self._queue_changed(name, s, r))

    def finished(self, timing: Timing) -> None:
        """Count one finished operation and tell the log and the event hook."""
        self.transport.stopwatch.record(timing)
        logger.debug(
            "%s took %.3f s (%.3f s to submit, %d requests)%s",
            timing.operation,
            timing.seconds,
            timing.submit_seconds,
            timing.num_requests,
            "" if timing.ok else " and failed",
        )
        self._emit(timing)

    def metrics(self) -> Metrics:
        """Counters and percentiles so far."""
        return self.transport.stopwatch.snapshot()

    def console_url(self, page: str, name: str | None) -> str:
        """Where a person can look at something of this server."""
        is_hosted = self.config.base_url == HOSTED_BASE_URL
        console = HOSTED_CONSOLE_URL if is_hosted else f"{self.config.base_url}/console"
        return f"{console}/{page}/{path_segment(name)}" if name else f"{console}/{page}"

    @property
    def known_session_id(self) -> str | None:
        """The session's id, if there is one already."""
        session = self._session
        has_one = session is not None and session.done() and not _has_failed(session)
        return session.result() if session is not None and has_one else None

    async def identity_token(self) -> str:
        """A token that says who this credential belongs to."""
        if self._tokens is not None:
            return await self._tokens.get()
        if self.credential is not None and self.credential.is_jwt:
            return await self.credential.read()
        raise ConfigError(
            "This server identifies keys without tokens, so it cannot say who you are",
            hint="whoami needs a server with token authentication.",
        )

    # --- ids, reserved by the caller's thread -------------------------------------------

    def next_model_seq_id(self) -> int:
        """The number of the next training client in this session."""
        return next(self._model_seq_ids)

    def next_sampling_seq_id(self) -> int:
        """The number of the next sampling session in this session."""
        return next(self._sampling_seq_ids)

    def next_custom_loss_seq_id(self) -> int:
        """The number of the next uploaded loss in this session."""
        return next(self._custom_loss_seq_ids)

    # --- start-up, each step once -------------------------------------------------------

    async def ready(self) -> None:
        """Read the server's flags; the first caller does it, the others wait for it."""
        if self._start is None or _has_failed(self._start):
            self._start = asyncio.get_running_loop().create_task(self._read_flags())
        await asyncio.shield(self._start)

    async def session_id(self) -> str:
        """The session, created when first asked for."""
        if self.is_closed:
            raise ClientClosed("This client is closed")
        if self._session is None or _has_failed(self._session):
            self._session = asyncio.get_running_loop().create_task(self._open_session())
        return await asyncio.shield(self._session)

    async def _read_flags(self) -> None:
        message = types.ClientConfigRequest(sdk_version=WIRE_VERSION)
        try:
            seconds = self.transport.timeout_for(CLIENT_CONFIG)
            request = outgoing(CLIENT_CONFIG, message, timeout_seconds=seconds)
            response = await self.transport.deliver(request)
            self.flags = self.transport.read(CLIENT_CONFIG, response)
            # Only a server that says so itself is trusted to put chunks in order.
            self.sorts_chunks = b"parallel_fwdbwd_chunks" in response.content and (
                self.flags.parallel_fwdbwd_chunks
            )
        except APIStatusError as error:
            # A server without flags speaks the defaults.
            if error.status not in {404, 405}:
                raise
        self.response_budget.limit_bytes = self.flags.inflight_response_bytes_semaphore_size
        self.dispatch_budget.limit_bytes = self.flags.fwdbwd_dispatch_bytes_semaphore_size
        self.lane.use(self.flags)
        if self.flags.pjwt_auth_enabled and self.credential is not None:
            self._tokens = TokenSource(self.credential, self._exchange_credential)
            self._last_token.renew = weakref.WeakMethod(self._renew_token)

    async def _open_session(self) -> str:
        await self.ready()
        joined = self.plan.joined_session_id
        session_id = joined or await create_session(
            self.transport, self.plan.user_metadata, self.plan.display_name
        )
        self._heartbeat = Heartbeat(self.pulse, session_id)
        self._heartbeat.start()
        weakref.finalize(self, self._heartbeat.stop).atexit = False
        if self.telemetry is not None:
            self.telemetry.begin(session_id)
        return session_id

    async def can_cancel(self) -> bool:
        """Whether the server wants to hear of cancelled samples; asked again now and then."""
        stale_seconds = max(10.0, self.dynamic_flags.refresh_interval_sec)
        now = time.monotonic()
        if self._dynamic_flags_at is None or now - self._dynamic_flags_at > stale_seconds:
            self._dynamic_flags_at = now
            message = types.ClientConfigRequest(sdk_version=WIRE_VERSION)
            try:
                self.dynamic_flags = await self.transport.call(
                    DYNAMIC_CONFIG, message, policy=NO_RETRY
                )
            except TinkexError as error:
                # A server without dynamic flags speaks the defaults; a failed refresh keeps them.
                logger.debug("Dynamic configuration was not refreshed: %s", error)
        return self.dynamic_flags.sample_cancel_enabled

    # --- credentials --------------------------------------------------------------------

    def _check_credential(self) -> None:
        if self.credential is None and self.config.base_url == HOSTED_BASE_URL:
            raise ConfigError(
                "No API key was given",
                hint="Pass api_key=..., set TINKER_API_KEY, or pass base_url=... of your server.",
            )

    async def _current_credential(self) -> str | None:
        if self._tokens is not None:
            self._last_token.value = await self._tokens.get()
        else:
            self._last_token.value = await self.credential.read() if self.credential else None
        return self._last_token.value

    async def _exchange_credential(self, raw: str) -> str:
        source = self.credential.source if self.credential else ""
        plain = Transport(self.config, self.transport.http, _constant(raw), source)
        plain.has_contact = self.transport.has_contact
        try:
            return (await plain.call(AUTH_TOKEN)).jwt
        except TinkexError as error:
            # Tried often enough here: the request that needs the token must not start over.
            error.verdict = Verdict(error.is_user_error, is_retryable=False)
            raise

    def _renew_token(self) -> None:
        if not self.is_closed:
            self.task(_quietly(self._current_credential()))

    def _lane_key(self) -> str | None:
        """What tells this client's lane from others: its key, or the command that prints it."""
        credential = self.credential
        return (credential.value or credential.command) if credential else None

    def _secrets(self) -> list[str]:
        """What must never be shown; tokens and keys of the usual form are known by their looks."""
        key = self.credential.value if self.credential else None
        own = (key, self._last_token.value, self.config.environment.access_client_secret)
        # A short header is a setting; hiding every "1" in a text would help nobody.
        others = [text for text in self.config.headers.values() if len(text) >= 8]
        return [secret for secret in (*own, *others) if secret]

    # --- the end ------------------------------------------------------------------------

    def close(self, status: FinishStatus, detail: str | None = None) -> APIFuture[None]:
        """Stop heartbeats at once, then finish the session; closing twice is fine."""
        was_closed, self.is_closed = self.is_closed, True
        _OPEN.discard(self)
        if self._heartbeat is not None:
            self._heartbeat.stop()
        return IO.start(_nothing() if was_closed else self._finish(status, detail))

    async def _finish(self, status: str, detail: str | None) -> None:
        try:
            await self._stop_work()
            session_id = await self._own_session()
            if session_id is not None:
                await finish_session(self.transport, session_id, status, detail)
            if self.telemetry is not None:
                await self.telemetry.end()
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._hooks.stop()

    async def _stop_work(self) -> None:
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=STOP_SECONDS)

    async def _own_session(self) -> str | None:
        """The session this client opened; None if it opened none, or could not."""
        if self._session is None or self.plan.joined_session_id is not None:
            return None
        await asyncio.wait([self._session], timeout=STOP_SECONDS)
        return self.known_session_id

    def _queue_changed(self, name: str, state: QueueState, reason: str | None) -> None:
        self._emit(QueueChanged(client=name, state=str(state), reason=reason))

    def _emit(self, event: object) -> None:
        hook = self.config.event_hook
        if hook is not None:
            self._hooks.run(lambda: hook(event))


_OPEN: weakref.WeakSet[Holder] = weakref.WeakSet()


def _finish_all() -> None:
    """At interpreter exit: finish sessions nobody else can be using."""
    for holder in list(_OPEN):
        if holder._session is not None and not holder.has_exported_handle:
            try:
                holder.close("success").result(timeout=2.0)
            except (TinkexError, TimeoutError) as error:
                logger.debug("A session was not finished at exit: %s", error)


atexit.register(_finish_all)
if hasattr(os, "register_at_fork"):
    # A child must not finish the sessions of its parent.
    os.register_at_fork(after_in_child=_OPEN.clear)


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _constant(value: str) -> Callable[[], Awaitable[str | None]]:
    async def credential() -> str | None:
        return value

    return credential


async def _quietly(work: Awaitable[object]) -> None:
    with contextlib.suppress(TinkexError):
        await work


async def _nothing() -> None:
    return None
