"""A session: created when first needed, kept alive by heartbeats, finished on close."""

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

#: Silence longer than this is worth a warning.
HEARTBEAT_WARNING_SECONDS = 120.0
FINISH_POLICY = RetryPolicy(max_retries=2, outage_seconds=3.0)
FINISH_REASONS: dict[str, types.ClientSessionFinishReason] = {
    "success": types.ClientSessionFinishSuccess(),
    "errored": types.ClientSessionFinishErrored(),
    "interrupted": types.ClientSessionFinishInterrupted(),
}


class SessionHeartbeat:
    """Says "alive" for one session, on the pulse thread, until told to stop."""

    def __init__(self, transport: Transport, session_id: str) -> None:
        self.session_id = session_id
        self._transport = transport
        self._interval_seconds = transport.config.heartbeat_seconds
        self._is_stopped = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the first beat comes after one interval."""
        HEARTBEAT_LOOP.post(self._start_task)

    def stop(self) -> None:
        """No beat is sent after this returns."""
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
        gate = OncePerMinute()
        stopwatch = self._transport.metrics
        while True:
            await asyncio.sleep(self._interval_seconds)
            if self._is_stopped:
                return
            try:
                await self._send()
            except TinkexError as error:
                stopwatch.count("heartbeats_failed")
                if isinstance(error, APIStatusError) and error.status == 410:
                    logger.debug("Session %s is finished", self.session_id)
                    return
                silence = time.monotonic() - last_success
                if silence >= HEARTBEAT_WARNING_SECONDS and gate.allows("silence"):
                    logger.warning(
                        "No heartbeat of session %s got through for %.0f s: %s",
                        self.session_id,
                        silence,
                        error,
                    )
            else:
                stopwatch.count("heartbeats")
                last_success = time.monotonic()

    async def _send(self) -> None:
        message = types.SessionHeartbeatRequest(session_id=self.session_id)
        await self._transport.call(HEARTBEAT, message, policy=NO_RETRY)


async def create_session(
    transport: Transport, user_metadata: dict[str, str], display_name: str | None
) -> str:
    """Ask the server for a session; show what it has to say."""
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
    """Tell the server how the session ended; a server that cannot know is not an error."""
    message = FinishSessionRequest(reason=FINISH_REASONS[status], detail=detail)
    try:
        await transport.call(
            FINISH_SESSION, message, ids={"session_id": session_id}, policy=FINISH_POLICY
        )
    except TinkexError as error:
        # Older servers have no such endpoint, and a finished session may be gone. With a server
        # that is away the session expires; raising would hide what the caller's block raised.
        log = logger.debug if error.status in {404, 405, 410} else logger.warning
        log("Session %s was not finished on the server: %s", session_id, error)


def _log_message(log: Callable[..., None], text: str | None) -> None:
    if text:
        log("The server says: %s", text)


#: Answers of a server that has no such endpoint.
NOT_FOUND_STATUSES = frozenset({404, 405})
MIN_REFRESH_SECONDS = 10.0


class ServerFlags:
    """The flags of one server; a server without them speaks the defaults."""

    def __init__(self, transport: Transport) -> None:
        self.values = ClientConfigResponse()
        #: Whether the server takes protobuf; None until a batch has been sent.
        self.accepts_protobuf: bool | None = None
        #: Whether the server said that chunks of one call may arrive in any order.
        self.accepts_unordered_chunks = False
        self._transport = transport
        self._dynamic = ClientDynamicConfigResponse()
        self._refreshed_at: float | None = None
        self._refresh_task: asyncio.Task[None] | None = None

    async def fetch(self) -> None:
        """Ask the server, once."""
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
        # Only a server that says so itself is trusted to put chunks in order.
        is_said = b"parallel_fwdbwd_chunks" in response.content
        self.accepts_unordered_chunks = is_said and self.values.parallel_fwdbwd_chunks

    async def can_cancel(self) -> bool:
        """Whether the server wants to hear of cancelled samples; asked again now and then."""
        stale_seconds = max(MIN_REFRESH_SECONDS, self._dynamic.refresh_interval_sec)
        now = time.monotonic()
        if self._refreshed_at is None or now - self._refreshed_at > stale_seconds:
            # One question serves all who ask meanwhile.
            if self._refresh_task is None or self._refresh_task.done():
                self._refresh_task = asyncio.get_running_loop().create_task(self._refresh())
            await asyncio.shield(self._refresh_task)
        return self._dynamic.sample_cancel_enabled

    async def _refresh(self) -> None:
        message = ClientConfigRequest(sdk_version=WIRE_VERSION)
        try:
            self._dynamic = await self._transport.call(DYNAMIC_CONFIG, message, policy=NO_RETRY)
        except TinkexError as error:
            # A failed refresh keeps what was known before.
            logger.debug("Dynamic configuration was not refreshed: %s", error)
        self._refreshed_at = time.monotonic()
