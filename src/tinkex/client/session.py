"""Create and finish sessions, send heartbeats, and read the server's flags."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tinkex import types
from tinkex.client.io_loop import HEARTBEAT_LOOP
from tinkex.client.retry import NO_RETRY, RetryPolicy
from tinkex.client.transport import WIRE_VERSION, Transport, build_request
from tinkex.errors import APIStatusError, TinkexError
from tinkex.logs import OncePerMinute, get_logger
from tinkex.types import ClientConfigRequest, ClientConfigResponse, ClientDynamicConfigResponse
from tinkex.wire.endpoints import (
    CLIENT_CONFIG,
    CREATE_SESSION,
    DYNAMIC_CONFIG,
    FINISH_SESSION,
    HEARTBEAT,
)
from tinkex.wire.messages import FinishSessionRequest

logger = get_logger(__name__)

#: Log a warning if no heartbeat succeeded for this long.
HEARTBEAT_WARNING_SECONDS = 120.0
FINISH_POLICY = RetryPolicy(max_retries=2, outage_seconds=3.0)
FINISH_REASONS: dict[str, types.ClientSessionFinishReason] = {
    "success": types.ClientSessionFinishSuccess(),
    "errored": types.ClientSessionFinishErrored(),
    "interrupted": types.ClientSessionFinishInterrupted(),
}


class SessionHeartbeat:
    """Sends heartbeats for one session, on the heartbeat thread, until stopped."""

    def __init__(self, transport: Transport, session_id: str) -> None:
        self.session_id = session_id
        self._transport = transport
        self._interval_seconds = transport.config.heartbeat_seconds
        self._is_stopped = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start; the first heartbeat is sent after one interval."""
        HEARTBEAT_LOOP.post(self._start_task)

    def stop(self) -> None:
        """Stop; no heartbeat is sent after this returns."""
        self._is_stopped = True
        HEARTBEAT_LOOP.post(self._cancel_task)

    def _start_task(self) -> None:
        if not self._is_stopped:
            self._task = asyncio.get_running_loop().create_task(self._send_periodically())

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _send_periodically(self) -> None:
        last_success = time.monotonic()
        throttle = OncePerMinute()
        metrics = self._transport.metrics
        while True:
            await asyncio.sleep(self._interval_seconds)
            if self._is_stopped:
                return
            try:
                await self._send()
            except TinkexError as error:
                metrics.count("heartbeats_failed")
                if isinstance(error, APIStatusError) and error.status == 410:
                    logger.debug("Session %s is finished", self.session_id)
                    return
                seconds = time.monotonic() - last_success
                if seconds >= HEARTBEAT_WARNING_SECONDS and throttle.allows("failed"):
                    logger.warning(
                        "No heartbeat of session %s succeeded for %.0f s: %s",
                        self.session_id,
                        seconds,
                        error,
                    )
            else:
                metrics.count("heartbeats")
                last_success = time.monotonic()

    async def _send(self) -> None:
        message = types.SessionHeartbeatRequest(session_id=self.session_id)
        await self._transport.call(HEARTBEAT, message, policy=NO_RETRY)


async def create_session(
    transport: Transport, user_metadata: dict[str, str], display_name: str | None
) -> str:
    """Create a session and log the server's messages."""
    config = transport.config
    reply = await transport.call(
        CREATE_SESSION,
        types.CreateSessionRequest(
            tags=list(config.tags),
            user_metadata=user_metadata,
            sdk_version=WIRE_VERSION,
            project_id=config.project_id,
            display_name=display_name,
        ),
    )
    _log_message(logger.info, reply.info_message)
    _log_message(logger.warning, reply.warning_message)
    _log_message(logger.error, reply.error_message)
    return reply.session_id


async def finish_session(
    transport: Transport, session_id: str, status: str, detail: str | None
) -> None:
    """Report the end of a session to the server; a failure is logged, not raised."""
    message = FinishSessionRequest(reason=FINISH_REASONS[status], detail=detail)
    try:
        await transport.call(
            FINISH_SESSION, message, ids={"session_id": session_id}, policy=FINISH_POLICY
        )
    except TinkexError as error:
        # Older servers lack the endpoint, and a finished session may be deleted. If the server is
        # unreachable the session expires; raising would hide an exception of the caller's block.
        log = logger.debug if error.status in {404, 405, 410} else logger.warning
        log("Session %s was not finished on the server: %s", session_id, error)


def _log_message(log: Callable[..., None], text: str | None) -> None:
    if text:
        log("Message from the server: %s", text)


#: Statuses of a server that does not have an endpoint.
NOT_FOUND_STATUSES = frozenset({404, 405})
MIN_REFRESH_SECONDS = 10.0


class ServerFlags:
    """The flags of one server; defaults apply to servers that do not send them."""

    def __init__(self, transport: Transport) -> None:
        self.values = ClientConfigResponse()
        #: Whether the server accepts protobuf; None until a batch has been sent.
        self.accepts_protobuf: bool | None = None
        #: Whether the chunks of one call may arrive in any order.
        self.accepts_unordered_chunks = False
        self._transport = transport
        self._dynamic = ClientDynamicConfigResponse()
        self._refreshed_at: float | None = None
        self._refresh_task: asyncio.Task[None] | None = None

    async def fetch(self) -> None:
        """Read the flags from the server."""
        message = ClientConfigRequest(sdk_version=WIRE_VERSION)
        transport = self._transport
        seconds = min(transport.config.first_answer_seconds, transport.timeout_for(CLIENT_CONFIG))
        try:
            response = await transport.send_with_retries(
                build_request(CLIENT_CONFIG, message, timeout_seconds=seconds)
            )
        except APIStatusError as error:
            if error.status not in NOT_FOUND_STATUSES:
                raise
            return
        self.values = self._transport.decode_reply(CLIENT_CONFIG, response)
        # The flag's default does not count: the server must send it explicitly.
        is_explicit = b"parallel_fwdbwd_chunks" in response.content
        self.accepts_unordered_chunks = is_explicit and self.values.parallel_fwdbwd_chunks

    async def can_cancel(self) -> bool:
        """Return whether the server supports cancelling samples; refreshed at intervals."""
        stale_seconds = max(MIN_REFRESH_SECONDS, self._dynamic.refresh_interval_sec)
        now = time.monotonic()
        if self._refreshed_at is None or now - self._refreshed_at > stale_seconds:
            # Concurrent callers share one request.
            if self._refresh_task is None or self._refresh_task.done():
                self._refresh_task = asyncio.get_running_loop().create_task(self._refresh())
            await asyncio.shield(self._refresh_task)
        return self._dynamic.sample_cancel_enabled

    async def _refresh(self) -> None:
        message = ClientConfigRequest(sdk_version=WIRE_VERSION)
        try:
            self._dynamic = await self._transport.call(DYNAMIC_CONFIG, message, policy=NO_RETRY)
        except TinkexError as error:
            # A failed refresh keeps the previous values.
            logger.debug("Dynamic configuration was not refreshed: %s", error)
        self._refreshed_at = time.monotonic()
