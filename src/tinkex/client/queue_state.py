"""Queue states reported by the server, and notification of observers about changes."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from tinkex.logs import OncePerMinute, get_logger

logger = get_logger(__name__)


class QueueState(StrEnum):
    """Whether the server is working on a client's jobs, and why not."""

    ACTIVE = "active"  #: jobs are running
    PAUSED_RATE_LIMIT = "paused_rate_limit"  #: the account reached its rate limit
    PAUSED_CAPACITY = "paused_capacity"  #: the service has too little capacity
    UNKNOWN = "unknown"  #: a state that this client does not know

    @classmethod
    def parse(cls, text: object) -> QueueState:
        """Parse a state, ignoring case; None means active."""
        if text is None:
            return cls.ACTIVE
        try:
            return cls(str(text).lower())
        except ValueError:
            return cls.UNKNOWN


class QueueStateObserver(Protocol):
    """Receives changes of the queue state or its reason."""

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Handle a change; called off the I/O loop."""


_CAPACITY_REASON = "the backend is short of capacity, please wait"
DEFAULT_REASONS = {
    ("training", QueueState.PAUSED_RATE_LIMIT): "concurrent training clients limit reached",
    ("training", QueueState.PAUSED_CAPACITY): _CAPACITY_REASON,
    ("sampling", QueueState.PAUSED_RATE_LIMIT): "concurrent sampler weights limit reached",
    ("sampling", QueueState.PAUSED_CAPACITY): _CAPACITY_REASON,
}


class QueueStateLogger:
    """The default observer: logs once per minute that work is paused, and why."""

    def __init__(self, kind: str, name: str) -> None:
        self._kind = kind
        self._name = name
        self._log_throttle = OncePerMinute()

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Log every state except active."""
        if queue_state is QueueState.ACTIVE or not self._log_throttle.allows(queue_state):
            return
        reason = queue_state_reason or DEFAULT_REASONS.get((self._kind, queue_state), "no reason")
        logger.warning("%s of %s is paused: %s", self._kind.capitalize(), self._name, reason)


class QueueStateNotifier:
    """Passes each change of one client's queue state to its observer exactly once."""

    def __init__(
        self,
        observer: QueueStateObserver,
        run_callback: Callable[[Callable[[], None]], object],
        on_change: Callable[[QueueState, str | None], None] = lambda state, reason: None,
    ) -> None:
        self._observer = observer
        self._run_callback = run_callback
        self._on_change = on_change
        self._last: tuple[QueueState, str | None] = (QueueState.ACTIVE, None)

    def update(self, state: QueueState, reason: str | None) -> None:
        """Set the state; if it changed, notify the observer on another thread."""
        if (state, reason) == self._last:
            return
        self._last = (state, reason)
        self._on_change(state, reason)
        self._run_callback(lambda: self._notify_observer(state, reason))

    def update_from_body(self, body: object) -> None:
        """Set the state from an error body, if it contains one."""
        if isinstance(body, dict) and "queue_state" in body:
            self.update(QueueState.parse(body["queue_state"]), body.get("queue_state_reason"))

    def _notify_observer(self, state: QueueState, reason: str | None) -> None:
        try:
            self._observer.on_queue_state_change(state, reason)
        except Exception:
            # User code: its failure must not stop the client.
            logger.warning("A queue state observer raised an exception", exc_info=True)
