"""What the server says about itself, and what this client has learnt about it."""

from __future__ import annotations

import asyncio
import time

from tinkex.client.retry import NO_RETRY
from tinkex.client.transport import WIRE_VERSION, Transport, build_request
from tinkex.errors import APIStatusError, TinkexError
from tinkex.logs import get_logger
from tinkex.types import ClientConfigRequest, ClientConfigResponse, ClientDynamicConfigResponse
from tinkex.wire.endpoints import CLIENT_CONFIG, DYNAMIC_CONFIG

logger = get_logger(__name__)

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
