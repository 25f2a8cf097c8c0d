"""Usage events for the server: off by default, without secrets, sent in the background."""

from __future__ import annotations

import asyncio
import platform
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from tinkex import clock, types
from tinkex.client.credentials import redact
from tinkex.client.io_loop import IO_LOOP
from tinkex.client.retry import NO_RETRY
from tinkex.client.transport import WIRE_VERSION, Transport
from tinkex.errors import TinkexError
from tinkex.ids import new_id
from tinkex.logs import get_logger
from tinkex.types.telemetry import GenericEvent
from tinkex.wire.endpoints import TELEMETRY

logger = get_logger(__name__)

MAX_BATCH_EVENTS = 100
QUEUE_SIZE = 10_000
FLUSH_SECONDS = 10.0
DRAIN_SECONDS = 2.0
PROCESS_ID = new_id()


class Telemetry:
    """Collects the events of one session and sends them in batches, in the background.

    An event counts as delivered when the server has acknowledged it. After a 404 or 405 reporting
    stops; after other failures the next flush tries again.
    """

    def __init__(self, transport: Transport, secrets: Callable[[], Iterable[str]] = tuple) -> None:
        self.session_id: str | None = None
        self.num_delivered = 0
        self.num_dropped = 0
        self._transport = transport
        self._secrets = secrets
        self._events: deque[types.TelemetryEvent] = deque()
        self._index = 0
        self._started = time.monotonic()
        self._flusher: asyncio.Task[None] | None = None
        self._flush_lock = asyncio.Lock()
        self._is_unsupported = False

    def begin(self, session_id: str) -> None:
        """Start reporting; called on the I/O loop once the session exists."""
        self.session_id = session_id
        self._add(types.SessionStartEvent, severity="INFO")
        self._flusher = asyncio.get_running_loop().create_task(
            _flush_periodically(weakref.ref(self))
        )

    def log(
        self,
        event_name: str,
        event_data: Mapping[str, object] | None = None,
        severity: types.Severity = "INFO",
    ) -> bool:
        """Queue an event, from any thread; False if the queue is full or reporting is off."""
        if self._is_unsupported or len(self._events) >= QUEUE_SIZE:
            self.num_dropped += 1
            return False
        items = (event_data or {}).items()
        data = {self._redact(str(key)): self._redact(str(value)) for key, value in items}
        name = self._redact(event_name)
        IO_LOOP.post(lambda: self._add(GenericEvent, severity, event_name=name, event_data=data))
        return True

    def log_exception(self, error: BaseException) -> bool:
        """Queue an exception, with secrets removed."""
        if self._is_unsupported:
            return False
        fields = {
            "error_type": type(error).__name__,
            "error_message": self._redact(str(error)),
            "traceback": self._redact("".join(traceback.format_exception(error))),
        }
        IO_LOOP.post(lambda: self._add(types.UnhandledExceptionEvent, "ERROR", **fields))
        return True

    async def flush(self) -> None:
        """Send the queued events; after a failure they stay queued."""
        async with self._flush_lock:
            while self._events and not self._is_unsupported:
                batch = [self._events[i] for i in range(min(MAX_BATCH_EVENTS, len(self._events)))]
                if not await self._send(batch):
                    return
                for _ in batch:
                    self._events.popleft()
                self.num_delivered += len(batch)

    async def end(self) -> None:
        """Send a session-end event and the queued events, with a time limit."""
        if self._flusher is None:
            return
        self._flusher.cancel()
        duration = timedelta(seconds=time.monotonic() - self._started)
        self._add(types.SessionEndEvent, "INFO", duration=str(duration))
        try:
            await asyncio.wait_for(self.flush(), DRAIN_SECONDS)
        except TimeoutError:
            logger.debug("%d telemetry events were not delivered", len(self._events))

    async def _send(self, batch: list[types.TelemetryEvent]) -> bool:
        message = types.TelemetrySendRequest(
            events=batch,
            platform=platform.system(),
            sdk_version=WIRE_VERSION,
            session_id=self.session_id or f"sessionless-{PROCESS_ID}",
            process_uuid=PROCESS_ID,
        )
        try:
            await self._transport.call(TELEMETRY, message, policy=NO_RETRY)
        except TinkexError as error:
            logger.debug("Telemetry was not delivered: %s", error)
            self._is_unsupported = error.status in {404, 405}
            # Drop events that the server rejects for good: they would block the queue.
            return not error.retryable
        return True

    def _add(
        self, kind: type[types.TelemetryEvent], severity: types.Severity, **fields: Any
    ) -> None:
        if len(self._events) >= QUEUE_SIZE:
            self.num_dropped += 1
            return
        self._events.append(
            kind(
                event_id=new_id(),
                event_session_index=self._index,
                severity=severity,
                timestamp=clock.utc_now(),
                **fields,
            )
        )
        self._index += 1

    def _redact(self, text: str) -> str:
        return redact(text, self._secrets())


async def _flush_periodically(telemetry_ref: weakref.ref[Telemetry]) -> None:
    """Flush at intervals, without keeping the reporter and its client alive."""
    while True:
        await asyncio.sleep(FLUSH_SECONDS)
        telemetry = telemetry_ref()
        if telemetry is None or telemetry._is_unsupported:
            return
        await telemetry.flush()
        del telemetry
