"""Places in an object store, and what its outages mean for callers.

A place is a prefix that is used once: `checkpoints/<id>/<nonce>`. Two writers of one checkpoint
never share a place.
"""

from __future__ import annotations

import hashlib
import threading

from tinkex.errors import FailureClass, RequestErrorCategory, TinkexError
from tinkex.ids import new_id

#: The object that names the store whose files these are.
STORE_ID_KEY = "store-id"
#: When work is tried again: while its files are downloaded, and during an outage.
PENDING_SECONDS = 0.05
OUTAGE_SECONDS = 0.5
AREAS = ("checkpoints", "snapshots", "payloads")
#: How long calls fail at once after a failure; it doubles with every failure.
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 8.0


class BlobsUnavailable(TinkexError):
    """The object store cannot be used now."""

    category = RequestErrorCategory.Server
    verdict = FailureClass(is_user_error=False, is_retryable=True)


class BlobPending(BlobsUnavailable):
    """The object is being downloaded."""


def retry_seconds(error: BlobsUnavailable) -> float:
    """Return when to try again what failed with this error."""
    return PENDING_SECONDS if isinstance(error, BlobPending) else OUTAGE_SECONDS


def new_place(area: str, name: str) -> str:
    """Return a place that was never used before."""
    return f"{area}/{name.replace(':', '_')}/{new_id()}"


def payload_place(content: bytes) -> str:
    """Return a new place for a payload; it contains the digest."""
    return new_place("payloads", hashlib.sha256(content).hexdigest())


class OutageGate:
    """Lets calls fail at once for a while after a failure, so that nothing waits for timeouts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pause_seconds = 0.0
        self._closed_until = 0.0
        self._reason = ""

    def check(self, now: float) -> None:
        """Raise BlobsUnavailable during an outage."""
        with self._lock:
            if now < self._closed_until:
                raise BlobsUnavailable(self._reason)

    def record_success(self) -> bool:
        """End the outage; returns whether there was one."""
        with self._lock:
            had_outage = self._pause_seconds > 0
            self._pause_seconds = self._closed_until = 0.0
            return had_outage

    def record_failure(self, reason: str, now: float) -> bool:
        """Begin or extend the outage; returns whether it is new."""
        with self._lock:
            is_new = self._pause_seconds == 0
            doubled = max(FIRST_PAUSE_SECONDS, 2 * self._pause_seconds)
            self._pause_seconds = min(MAX_PAUSE_SECONDS, doubled)
            self._closed_until = now + self._pause_seconds
            self._reason = reason
            return is_new
