"""What is counted about this process and its store, in the words of Prometheus."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tinkex.store.figures import StoreStats

REGISTRY = CollectorRegistry(auto_describe=True)
"""One per process, as the counters are."""

PROCESS = Gauge(
    "tinkex_api_process",
    "Which process answered: several share a port, and each counts its own requests.",
    ["pid"],
    registry=REGISTRY,
)
REQUESTS = Counter(
    "tinkex_requests", "Requests answered.", ["endpoint", "status"], registry=REGISTRY
)
LATENCY = Histogram(
    "tinkex_request_seconds",
    "From the arrival of a request to its answer; long polls wait on purpose.",
    ["endpoint"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0),
    registry=REGISTRY,
)
TELEMETRY = Counter(
    "tinkex_telemetry_events", "Events that clients reported.", ["event"], registry=REGISTRY
)
CONNECTIONS = Gauge("tinkex_connections", "Open connections of this process.", registry=REGISTRY)
CLOSED = Counter(
    "tinkex_connections_closed",
    "Connections that the server closed: limit, timeout, unread answer, or refused request.",
    ["reason"],
    registry=REGISTRY,
)
WAITING = Gauge("tinkex_jobs_waiting", "Promises that nobody has taken.", registry=REGISTRY)
RUNNING = Gauge("tinkex_jobs_running", "Promises that the worker has.", registry=REGISTRY)
OLDEST = Gauge(
    "tinkex_oldest_waiting_seconds", "Age of the oldest promise that waits.", registry=REGISTRY
)
SESSIONS = Gauge("tinkex_sessions_active", "Sessions that are not over.", registry=REGISTRY)
WORKERS = Gauge("tinkex_workers_alive", "Workers seen lately.", registry=REGISTRY)
STORE_BYTES = Gauge("tinkex_store_bytes", "Size of the database.", registry=REGISTRY)
STORE_UP = Gauge("tinkex_store_up", "Whether the database answers.", registry=REGISTRY)


class RequestMeter:
    """Counts the requests of one endpoint."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._seconds = LATENCY.labels(endpoint)
        self._by_status: dict[int, Counter] = {}

    def count(self, status: int, seconds: float) -> None:
        """Note one answer."""
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = REQUESTS.labels(self._endpoint, str(status))
        counter.inc()
        self._seconds.observe(seconds)


def write_metrics(figures: StoreStats | None, now: float) -> bytes:
    """Everything that is counted, as Prometheus reads it; no figures means no database."""
    PROCESS.labels(str(os.getpid())).set(1)
    STORE_UP.set(figures is not None)
    if figures is not None:
        oldest = figures.oldest_waiting_at
        WAITING.set(figures.num_waiting)
        RUNNING.set(figures.num_running)
        OLDEST.set(0.0 if oldest is None else max(now - oldest, 0.0))
        SESSIONS.set(figures.num_sessions)
        WORKERS.set(figures.num_workers)
        STORE_BYTES.set(figures.store_bytes)
    return generate_latest(REGISTRY)
