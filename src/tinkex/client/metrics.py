"""Client metrics: counters, latency percentiles and the events passed to the event hook."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

#: Percentiles cover this many of the latest operations of a kind.
PERCENTILE_WINDOW = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One finished operation."""

    operation: str
    """The operation's name, e.g. forward_backward."""
    seconds: float
    """From the call to its result."""
    submit_seconds: float
    """From the call until the server accepted it."""
    num_requests: int = 1
    """Number of requests it was split into."""
    ok: bool = True
    """Whether it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDone:
    """One logical request, including its retries."""

    endpoint: str
    status: int | None
    seconds: float
    num_retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueChanged:
    """The queue state of one client changed."""

    client: str
    state: str
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """Latencies of all operations of one kind."""

    count: int
    failed: int
    total_seconds: float
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    max_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Counters and latencies of a client since its creation."""

    operations: Mapping[str, LatencySummary]
    """By operation, e.g. metrics.operations["forward_backward"].p99_seconds."""
    counters: Mapping[str, int]
    """requests, retries, polls, bytes_sent, bytes_received, heartbeats, heartbeats_failed ..."""


class MetricsRecorder:
    """Collects timings and counters of one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counters: Counter[str] = Counter()
        self._recent: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=PERCENTILE_WINDOW)
        )
        self._totals: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter, from any thread."""
        with self._lock:
            self.counters[name] += amount

    def record(self, timing: Timing) -> None:
        """Add one finished operation, from any thread."""
        with self._lock:
            self._record(timing)

    def _record(self, timing: Timing) -> None:
        self._recent[timing.operation].append(timing.seconds)
        totals = self._totals[timing.operation]
        totals[0] += 1
        totals[1] += not timing.ok
        totals[2] += timing.seconds
        totals[3] = max(totals[3], timing.seconds)

    def snapshot(self) -> Metrics:
        """Return an immutable copy of the current metrics."""
        operations = {name: self._summarize(name) for name in list(self._totals)}
        return Metrics(operations=operations, counters=dict(self.counters))

    def _summarize(self, name: str) -> LatencySummary:
        count, failed, total, longest = self._totals[name]
        ordered = sorted(self._recent[name])
        return LatencySummary(
            count=int(count),
            failed=int(failed),
            total_seconds=total,
            p50_seconds=percentile(ordered, 0.50),
            p90_seconds=percentile(ordered, 0.90),
            p99_seconds=percentile(ordered, 0.99),
            max_seconds=longest,
        )


def percentile(ordered: list[float], fraction: float) -> float:
    """Return the nearest-rank percentile of an ordered list."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
