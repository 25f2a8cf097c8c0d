"""Things that go wrong on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from tinkex.errors import InvalidInput
from tinkex.testing.answers import JSON_TYPE, Answer
from tinkex.testing.calls import Call

Match: TypeAlias = Callable[[Call], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What to do instead of, before or after the real answer."""

    status: int | None = None
    """Answer with this status, without doing the work; None does the work."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of that answer; without a status, headers added to the real one."""
    body: Mapping[str, Any] | bytes | None = None
    """Body of that answer: a mapping becomes JSON, bytes are sent as they are."""
    delay_seconds: float = 0.0
    """Wait this long first."""
    drop: bool = False
    """Close the connection without an answer, before the work."""
    drop_after: bool = False
    """Do the work, then close without an answer: the answer is lost."""
    cut_after_bytes: int | None = None
    """Close after this many bytes of the answer's body, though its length says more."""
    chunked: bool = False
    """Answer in chunks, without a content-length."""
    garbage: bytes | None = None
    """Write these bytes, which need not be HTTP, instead of an answer, and close."""

    def __post_init__(self) -> None:
        if self.status is not None and not 200 <= self.status <= 599:
            raise InvalidInput(f"Fault.status is {self.status}; expected 200 to 599, or None")
        if self.status is None and self.body is not None:
            raise InvalidInput(f"Fault.body needs a status, got {self.body!r:.80} and none")
        if self.delay_seconds < 0.0:
            raise InvalidInput(f"Fault.delay_seconds is {self.delay_seconds}; expected at least 0")

    def answer(self) -> Answer:
        """The answer this fault gives instead of the real one."""
        headers = self.raw_headers()
        if isinstance(self.body, bytes):
            body = self.body
        else:
            body = b"" if self.body is None else msgspec.json.encode(dict(self.body))
            if body and not any(name == b"content-type" for name, _ in headers):
                headers = [JSON_TYPE, *headers]
        return Answer(self.status or 200, body, headers)

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers as they are written."""
        return [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in self.headers.items()
        ]


@dataclass(slots=True, eq=False)
class _Order:
    fault: Fault
    num_left: int | None
    match: Match | None


class FaultPlan:
    """Faults that wait for their calls, first come first served."""

    def __init__(self) -> None:
        self._orders: dict[str, list[_Order]] = {}
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """True when nothing is planned; read without the lock, for it is asked at every call."""
        return not self._orders

    def add(self, endpoint: str, fault: Fault, times: int | None, match: Match | None) -> None:
        """Plan a fault for the next calls of an endpoint; `times` None means all of them."""
        if times is not None and times < 1:
            raise InvalidInput(f"times is {times}; expected at least 1, or None for ever")
        with self._lock:
            self._orders.setdefault(endpoint, []).append(_Order(fault, times, match))

    def clear(self) -> None:
        """Forget everything planned."""
        with self._lock:
            self._orders.clear()

    def take(self, call: Call) -> Fault | None:
        """The fault for this call, if one is planned."""
        with self._lock:
            orders = self._orders.get(call.endpoint, [])
            for order in orders:
                if order.match is None or order.match(call):
                    self._use(call.endpoint, order)
                    return order.fault
        return None

    def _use(self, endpoint: str, order: _Order) -> None:
        if order.num_left is None:
            return
        order.num_left -= 1
        if order.num_left == 0:
            self._orders[endpoint].remove(order)
            if not self._orders[endpoint]:
                del self._orders[endpoint]
