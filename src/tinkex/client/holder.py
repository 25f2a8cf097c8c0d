"""What all clients made by one ServiceClient share: connection, session, flags and counters."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import os
import sys
import weakref
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tinkex import types
from tinkex.client.config import Config
from tinkex.client.future import APIFuture
from tinkex.client.http import FORK_GUARD, HttpClient, HttpTransport
from tinkex.client.identity import ClientIdentity
from tinkex.client.io_loop import IO_LOOP, CallbackThread
from tinkex.client.local_server import with_local_server
from tinkex.client.metrics import Metrics, QueueChanged, Timing
from tinkex.client.polling import Poller
from tinkex.client.queue_state import QueueState, QueueStateNotifier, QueueStateObserver
from tinkex.client.rate_limits import ByteBudget, SamplingLimits, get_sampling_limits
from tinkex.client.session import ServerFlags, SessionHeartbeat, create_session, finish_session
from tinkex.client.telemetry import Telemetry
from tinkex.client.transport import Transport
from tinkex.errors import ClientClosed, TinkexError
from tinkex.ids import path_segment
from tinkex.logs import attach_once, get_logger
from tinkex.settings import HOSTED_BASE_URL, HOSTED_CONSOLE_URL

T = TypeVar("T")
logger = get_logger(__name__)
#: How long closing waits for stopped work to end.
STOP_SECONDS = 1.0
#: How long the end of the program waits for sessions to be finished, in all.
EXIT_SECONDS = 2.0
FinishStatus = Literal["success", "errored", "interrupted"]


@dataclass(slots=True)
class SessionPlan:
    """How the session is created, or which existing one is joined."""

    user_metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    joined_session_id: str | None = None


class Holder:
    """Shared state of one tree of clients. Requests run on the I/O loop."""

    def __init__(
        self,
        config: Config,
        plan: SessionPlan | None = None,
        transport: HttpTransport | None = None,
        *,
        needs_worker: bool = True,
    ) -> None:
        if config.environment.log_level:
            attach_once(config.environment.log_level)
        if transport is None:
            config = with_local_server(config, needs_worker=needs_worker)
        self.config = config
        self.plan = plan or SessionPlan()
        http = HttpClient(config, transport)
        polls = HttpClient(config.evolve(http_pool=f"{config.http_pool}/polls"), transport)
        beats = HttpClient(config.evolve(http_pool=f"{config.http_pool}/beats"), transport)
        self.identity = ClientIdentity(config, http)
        source = self.identity.source
        self.transport = Transport(config, http, self.identity.get_credential, source, polls)
        self.transport.on_request_done = self._emit
        # The pulse has connections of its own and never waits for a token.
        self._heartbeat_transport = Transport(config, beats, self.identity.last_token.get, source)
        self._heartbeat_transport.metrics = self.transport.metrics
        self.server = ServerFlags(self.transport)
        self.sampling_limits: SamplingLimits = get_sampling_limits(
            config, self.identity.rate_limit_key
        )
        self.sample_slots = asyncio.Semaphore(config.max_concurrent_samples)
        self.response_budget = ByteBudget(self.flags.inflight_response_bytes_semaphore_size)
        self.dispatch_budget = ByteBudget(self.flags.fwdbwd_dispatch_bytes_semaphore_size)
        secrets = self.identity.secrets
        self.telemetry = Telemetry(self.transport, secrets) if config.telemetry else None
        self._model_seq_ids = itertools.count()
        self._sampling_seq_ids = itertools.count()
        self._custom_loss_seq_ids = itertools.count()
        self._ready_task: asyncio.Task[None] | None = None
        self._session_task: asyncio.Task[str] | None = None
        self._heartbeat: SessionHeartbeat | None = None
        self._callbacks = CallbackThread()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_closed = False
        self._close_future: APIFuture[None] | None = None
        self.has_exported_handle = False
        _OPEN_HOLDERS.add(self)

    @property
    def flags(self) -> types.ClientConfigResponse:
        """The server's flags; its defaults until ready()."""
        return self.server.values

    # --- running work -------------------------------------------------------------------

    def start(self, coroutine: Coroutine[Any, Any, T]) -> APIFuture[T]:
        """Run work on the I/O loop, unless this client is closed."""
        try:
            self.check_usable()
        except TinkexError:
            coroutine.close()
            raise
        return IO_LOOP.start(coroutine, self.create_task)

    def check_usable(self) -> None:
        """Refuse work on a closed client, and in a child that inherited one."""
        FORK_GUARD.check()
        if self.is_closed:
            raise ClientClosed("This client is closed")

    def create_task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task on the I/O loop that closing this client stops."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.is_closed:
            task.cancel()
        return task

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run work and wait for it."""
        return self.start(coroutine).result()

    def poller(self, observer: QueueStateObserver, name: str) -> Poller:
        """Waits for results; tells the observer, and the event hook, about queue changes."""
        watch = QueueStateNotifier(
            observer,
            self._callbacks.submit,
            lambda state, why: self._emit_queue_changed(name, state, why),
        )
        return Poller(self.transport, watch, self.response_budget)

    def record_timing(self, timing: Timing) -> None:
        """Count one finished operation and tell the log and the event hook."""
        self.transport.metrics.record(timing)
        logger.debug(
            "%s took %.3f s (%.3f s to submit, %d requests)%s",
            timing.operation,
            timing.seconds,
            timing.submit_seconds,
            timing.num_requests,
            "" if timing.ok else " and failed",
        )
        self._emit(timing)
        if self.telemetry is not None and not timing.ok:
            self.telemetry.log("operation_failed", {"operation": timing.operation}, "WARNING")

    def metrics(self) -> Metrics:
        """Counters and percentiles so far."""
        return self.transport.metrics.snapshot()

    def console_url(self, page: str, name: str | None) -> str:
        """Where a person can look at something of this server."""
        is_hosted = self.config.base_url == HOSTED_BASE_URL
        console = HOSTED_CONSOLE_URL if is_hosted else f"{self.config.base_url}/console"
        return f"{console}/{page}/{path_segment(name)}" if name else f"{console}/{page}"

    @property
    def known_session_id(self) -> str | None:
        """The session's id, if there is one already."""
        session = self._session_task
        has_one = session is not None and session.done() and not _has_failed(session)
        return session.result() if session is not None and has_one else None

    def get_session_id(self) -> str:
        """The session's id; opens the session and waits for it if there is none yet."""
        return self.known_session_id or self.run(self.session_id())

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
        if self._ready_task is None or _has_failed(self._ready_task):
            self._ready_task = asyncio.get_running_loop().create_task(self._read_flags())
            self._ready_task.add_done_callback(_has_failed)
        await asyncio.shield(self._ready_task)

    async def session_id(self) -> str:
        """The session, created when first asked for."""
        if self.is_closed:
            raise ClientClosed("This client is closed")
        if self._session_task is None or _has_failed(self._session_task):
            self._session_task = asyncio.get_running_loop().create_task(self._open_session())
            self._session_task.add_done_callback(_has_failed)
        return await asyncio.shield(self._session_task)

    async def _read_flags(self) -> None:
        await self.server.fetch()
        self.response_budget.limit_bytes = self.flags.inflight_response_bytes_semaphore_size
        self.dispatch_budget.limit_bytes = self.flags.fwdbwd_dispatch_bytes_semaphore_size
        self.sampling_limits.apply_server_config(self.flags)
        self.transport.apply_server_config(self.flags)
        if self.flags.pjwt_auth_enabled:
            self.identity.use_tokens(self.flags.credential_default_source)

    async def _open_session(self) -> str:
        await self.ready()
        joined = self.plan.joined_session_id
        session_id = joined or await create_session(
            self.transport, self.plan.user_metadata, self.plan.display_name
        )
        if self.is_closed:
            # Closed meanwhile: a session that nobody wants must not stay behind.
            await finish_session(self.transport, session_id, "interrupted", None)
            raise ClientClosed("This client is closed")
        self._heartbeat = SessionHeartbeat(self._heartbeat_transport, session_id)
        self._heartbeat.start()
        weakref.finalize(self, self._heartbeat.stop).atexit = False
        if self.telemetry is not None:
            self.telemetry.begin(session_id)
        return session_id

    # --- the end ------------------------------------------------------------------------

    def close(self, status: FinishStatus, detail: str | None = None) -> APIFuture[None]:
        """Stop heartbeats at once, then finish the session; closing twice is fine."""
        self.is_closed = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._close_future is None:
            self._close_future = IO_LOOP.start(self._finish(status, detail))
        return self._close_future

    async def _finish(self, status: str, detail: str | None) -> None:
        try:
            await self._cancel_tasks()
            session_id = await self._owned_session_id()
            if session_id is not None:
                await finish_session(self.transport, session_id, status, detail)
            if self.telemetry is not None:
                await self.telemetry.end()
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._callbacks.stop()
            _OPEN_HOLDERS.discard(self)

    @property
    def should_finish_at_exit(self) -> bool:
        """True for a session that only this process can be using, or that is closing already."""
        return self._close_future is not None or (
            self._session_task is not None and not self.has_exported_handle
        )

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS)

    async def _owned_session_id(self) -> str | None:
        """The session this client opened; None if it opened none, or could not."""
        if self._session_task is None or self.plan.joined_session_id is not None:
            return None
        await asyncio.wait([self._session_task], timeout=STOP_SECONDS)
        return self.known_session_id

    def _emit_queue_changed(self, name: str, state: QueueState, reason: str | None) -> None:
        self._emit(QueueChanged(client=name, state=str(state), reason=reason))

    def _emit(self, event: object) -> None:
        hook = self.config.event_hook
        if hook is not None:
            self._callbacks.submit(lambda: hook(event))


_OPEN_HOLDERS: weakref.WeakSet[Holder] = weakref.WeakSet()


def _finish_all_sessions() -> None:
    """At interpreter exit: finish sessions nobody else can be using."""
    # Python leaves an exception that ended the program here.
    error = getattr(sys, "last_value", None)
    status: FinishStatus = "success" if error is None else "errored"
    if error is not None and not isinstance(error, Exception):
        status = "interrupted"
    ending = [
        holder.close(status) for holder in list(_OPEN_HOLDERS) if holder.should_finish_at_exit
    ]
    concurrent.futures.wait(ending, timeout=EXIT_SECONDS)


atexit.register(_finish_all_sessions)
if hasattr(os, "register_at_fork"):
    # A child must not finish the sessions of its parent.
    os.register_at_fork(after_in_child=_OPEN_HOLDERS.clear)


def _has_failed(task: asyncio.Task[Any]) -> bool:
    """Whether a step ended badly; having asked, asyncio does not complain that nobody did."""
    return task.done() and (task.cancelled() or task.exception() is not None)
