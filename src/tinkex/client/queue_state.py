"""What the server says about its queue, and who is told when that changes."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from tinkex.logs import OncePerMinute, get_logger

logger = get_logger(__name__)


class QueueState(StrEnum):
    """Why a result may take longer."""

    ACTIVE = "active"  #: it is being worked on
    PAUSED_RATE_LIMIT = "paused_rate_limit"  #: this account has too much under way
    PAUSED_CAPACITY = "paused_capacity"  #: the service is short of machines
    UNKNOWN = "unknown"  #: the server used a word this client does not know

    @classmethod
    def parse(cls, text: object) -> QueueState:
        """Read a state from the wire, whatever its case; none at all means nothing is wrong."""
        if text is None:
            return cls.ACTIVE
        try:
            return cls(str(text).lower())
        except ValueError:
            return cls.UNKNOWN


class QueueStateObserver(Protocol):
    """Is told when the state, or its reason, changes."""

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Called off the I/O loop, only on a change."""


_CAPACITY_REASON = "the backend is short of capacity, please wait"
DEFAULT_REASONS = {
    ("training", QueueState.PAUSED_RATE_LIMIT): "concurrent training clients limit reached",
    ("training", QueueState.PAUSED_CAPACITY): _CAPACITY_REASON,
    ("sampling", QueueState.PAUSED_RATE_LIMIT): "concurrent sampler weights limit reached",
    ("sampling", QueueState.PAUSED_CAPACITY): _CAPACITY_REASON,
}


class QueueStateLogger:
    """The default observer: says once a minute that work is paused, and why."""

    def __init__(self, kind: str, name: str) -> None:
        self._kind = kind
        self._name = name
        self._log_throttle = OncePerMinute()

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Log anything but active."""
        if queue_state is QueueState.ACTIVE or not self._log_throttle.allows(queue_state):
            return
        reason = queue_state_reason or DEFAULT_REASONS.get((self._kind, queue_state), "no reason")
        logger.warning("%s of %s is paused: %s", self._kind.capitalize(), self._name, reason)


class QueueStateNotifier:
    """Remembers the last state of one client and passes changes on, each exactly once."""

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
        """Note a state; tell the observer, off this thread, if it is news."""
        if (state, reason) == self._last:
            return
        self._last = (state, reason)
        self._on_change(state, reason)
        self._run_callback(lambda: self._notify_observer(state, reason))

    def update_from_body(self, body: object) -> None:
        """Note the state in an error's body, if it carries one."""
        if isinstance(body, dict) and "queue_state" in body:
            self.update(QueueState.parse(body["queue_state"]), body.get("queue_state_reason"))

    def _notify_observer(self, state: QueueState, reason: str | None) -> None:
        try:
            self._observer.on_queue_state_change(state, reason)
        except Exception:
            logger.warning("A queue state observer raised", exc_info=True)
