"""State shared by all clients of one ServiceClient: connections, session, flags and counters."""

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
from typing import Literal, TypeVar

from tinkex import types
from tinkex.client.config import Config
from tinkex.client.future import APIFuture
from tinkex.client.http import HttpClient, HttpTransport
from tinkex.client.identity import ClientIdentity
from tinkex.client.io_loop import FORK_GUARD, IO_LOOP, CallbackThread
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
#: How long close() waits for cancelled tasks to end.
STOP_SECONDS = 1.0
#: How long interpreter exit waits for all sessions to be finished.
EXIT_SECONDS = 2.0
FinishStatus = Literal["success", "errored", "interrupted"]


@dataclass(slots=True)
class SessionPlan:
    """How to create the session, or which existing session to join."""

    user_metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    joined_session_id: str | None = None


class Holder:
    """Shared state of a ServiceClient and the clients it creates. Requests run on the I/O loop."""

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
        poll_http = HttpClient(config.evolve(http_pool=f"{config.http_pool}/polls"), transport)
        beat_http = HttpClient(config.evolve(http_pool=f"{config.http_pool}/beats"), transport)
        self.identity = ClientIdentity(config, http)
        source = self.identity.source
        self.transport = Transport(config, http, self.identity.get_credential, source, poll_http)
        self.transport.on_request_done = self._emit
        # Heartbeats use separate connections and never wait for a new token.
        self._heartbeat_transport = Transport(
            config, beat_http, self.identity.last_token.get, source
        )
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
        self._tasks: set[asyncio.Task[object]] = set()
        self.is_closed = False
        self._close_future: APIFuture[None] | None = None
        self.has_exported_handle = False
        _OPEN_HOLDERS.add(self)

    @property
    def flags(self) -> types.ClientConfigResponse:
        """The server's flags; defaults until ready()."""
        return self.server.values

    # --- running work -------------------------------------------------------------------

    def start(self, coroutine: Coroutine[object, None, T]) -> APIFuture[T]:
        """Run a coroutine on the I/O loop; raises ClientClosed if this client is closed."""
        try:
            self.check_usable()
        except TinkexError:
            coroutine.close()
            raise
        return IO_LOOP.start(coroutine, self.create_task)

    def check_usable(self) -> None:
        """Raise if this client is closed, or was inherited by a forked process."""
        FORK_GUARD.check()
        if self.is_closed:
            raise ClientClosed("This client is closed")

    def create_task(self, coroutine: Coroutine[object, None, T]) -> asyncio.Task[T]:
        """Create a task on the I/O loop that close() cancels."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.is_closed:
            task.cancel()
        return task

    def run(self, coroutine: Coroutine[object, None, T]) -> T:
        """Run a coroutine on the I/O loop and wait for its result."""
        return self.start(coroutine).result()

    def poller(self, observer: QueueStateObserver, name: str) -> Poller:
        """Create a poller that reports queue changes to the observer and the event hook."""

        def emit_change(state: QueueState, reason: str | None) -> None:
            self._emit(QueueChanged(client=name, state=str(state), reason=reason))

        notifier = QueueStateNotifier(observer, self._callbacks.submit, emit_change)
        return Poller(self.transport, notifier, self.response_budget)

    def record_timing(self, timing: Timing) -> None:
        """Record one finished operation in metrics, log, event hook and telemetry."""
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
        """Return the current counters and latency percentiles."""
        return self.transport.metrics.snapshot()

    def console_url(self, page: str, name: str | None) -> str:
        """Return the URL of a page of the server's web console."""
        is_hosted = self.config.base_url == HOSTED_BASE_URL
        console = HOSTED_CONSOLE_URL if is_hosted else f"{self.config.base_url}/console"
        return f"{console}/{page}/{path_segment(name)}" if name else f"{console}/{page}"

    @property
    def known_session_id(self) -> str | None:
        """The session's id, if the session has been opened."""
        task = self._session_task
        return task.result() if task is not None and task.done() and not _has_failed(task) else None

    def get_session_id(self) -> str:
        """Return the session's id; opens the session first if necessary."""
        return self.known_session_id or self.run(self.session_id())

    # --- ids, reserved by the caller's thread -------------------------------------------

    def next_model_seq_id(self) -> int:
        """Return the sequence number of the next training client in this session."""
        return next(self._model_seq_ids)

    def next_sampling_seq_id(self) -> int:
        """Return the sequence number of the next sampling session in this session."""
        return next(self._sampling_seq_ids)

    def next_custom_loss_seq_id(self) -> int:
        """Return the sequence number of the next uploaded loss in this session."""
        return next(self._custom_loss_seq_ids)

    # --- start-up: each step runs once --------------------------------------------------

    async def ready(self) -> None:
        """Read the server's flags; concurrent callers share one request."""
        if self._ready_task is None or _has_failed(self._ready_task):
            self._ready_task = asyncio.get_running_loop().create_task(self._read_flags())
            self._ready_task.add_done_callback(_has_failed)
        await asyncio.shield(self._ready_task)

    async def session_id(self) -> str:
        """Return the session's id; the first call creates the session."""
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
            # Closed meanwhile: do not leave an unused session on the server.
            await finish_session(self.transport, session_id, "interrupted", None)
            raise ClientClosed("This client is closed")
        self._heartbeat = SessionHeartbeat(self._heartbeat_transport, session_id)
        self._heartbeat.start()
        weakref.finalize(self, self._heartbeat.stop).atexit = False
        if self.telemetry is not None:
            self.telemetry.begin(session_id)
        return session_id

    # --- shutdown -----------------------------------------------------------------------

    def close(self, status: FinishStatus, detail: str | None = None) -> APIFuture[None]:
        """Stop heartbeats immediately, then finish the session; may be called twice."""
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
        """True if only this process can be using the session, or if it is already closing."""
        return self._close_future is not None or (
            self._session_task is not None and not self.has_exported_handle
        )

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS)

    async def _owned_session_id(self) -> str | None:
        """Return the session this client opened; None if it opened none or opening failed."""
        if self._session_task is None or self.plan.joined_session_id is not None:
            return None
        await asyncio.wait([self._session_task], timeout=STOP_SECONDS)
        return self.known_session_id

    def _emit(self, event: object) -> None:
        hook = self.config.event_hook
        if hook is not None:
            self._callbacks.submit(lambda: hook(event))


_OPEN_HOLDERS: weakref.WeakSet[Holder] = weakref.WeakSet()


def _finish_all_sessions() -> None:
    """At interpreter exit, finish the sessions that no other process can be using."""
    # Python stores the exception that ended the program here.
    error = getattr(sys, "last_value", None)
    status: FinishStatus = "success" if error is None else "errored"
    if error is not None and not isinstance(error, Exception):
        status = "interrupted"
    closing = [
        holder.close(status) for holder in list(_OPEN_HOLDERS) if holder.should_finish_at_exit
    ]
    concurrent.futures.wait(closing, timeout=EXIT_SECONDS)


atexit.register(_finish_all_sessions)
if hasattr(os, "register_at_fork"):
    # A forked child must not finish the sessions of its parent.
    os.register_at_fork(after_in_child=_OPEN_HOLDERS.clear)


def _has_failed(task: asyncio.Task[object]) -> bool:
    """True if a task failed; retrieving its exception keeps asyncio from logging it."""
    return task.done() and (task.cancelled() or task.exception() is not None)
