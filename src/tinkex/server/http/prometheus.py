"""Prometheus metrics of an API process and its store."""

from __future__ import annotations

import os
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tinkex.jobs.stream_observer import StreamObserver
from tinkex.store.stats import StoreStats

REGISTRY = CollectorRegistry(auto_describe=True)
"""The registry of this process."""

API_PROCESS = Gauge(
    "tinkex_api_process",
    "The process that answered: several share a port, and each counts its own requests.",
    ["pid"],
    registry=REGISTRY,
)
REQUESTS = Counter(
    "tinkex_requests", "Requests handled.", ["endpoint", "status"], registry=REGISTRY
)
LATENCY = Histogram(
    "tinkex_request_seconds",
    "Time from a request to its response, including the wait of long polls.",
    ["endpoint"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0),
    registry=REGISTRY,
)
INFERENCE_REQUESTS = Counter(
    "tinkex_inference_requests",
    "Requests to the OpenAI and Anthropic endpoints; 499 means that the client went away.",
    ["family", "endpoint", "status"],
    registry=REGISTRY,
)
FIRST_TOKEN_SECONDS = Histogram(
    "tinkex_inference_first_token_seconds",
    "Time from a request with stream to the first part of its answer.",
    ["family"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    registry=REGISTRY,
)
TELEMETRY_EVENTS = Counter(
    "tinkex_telemetry_events", "Telemetry events from clients.", ["event"], registry=REGISTRY
)
CONNECTIONS = Gauge("tinkex_connections", "Open connections of this process.", registry=REGISTRY)
CONNECTIONS_CLOSED = Counter(
    "tinkex_connections_closed",
    "Connections that the server closed: limit, timeout, unread response or rejected request.",
    ["reason"],
    registry=REGISTRY,
)
JOBS_WAITING = Gauge("tinkex_jobs_waiting", "Jobs waiting for the worker.", registry=REGISTRY)
JOBS_RUNNING = Gauge("tinkex_jobs_running", "Jobs that the worker is running.", registry=REGISTRY)
OLDEST_WAITING = Gauge(
    "tinkex_oldest_waiting_seconds", "Age of the oldest waiting job.", registry=REGISTRY
)
SESSIONS_ACTIVE = Gauge("tinkex_sessions_active", "Active sessions.", registry=REGISTRY)
WORKERS_ALIVE = Gauge("tinkex_workers_alive", "Workers with a recent heartbeat.", registry=REGISTRY)
GROUP_QUEUED = Gauge(
    "tinkex_group_queued_seconds",
    "Estimated duration of the queued work of a worker group, if there are several.",
    ["group"],
    registry=REGISTRY,
)
GROUP_MODELS = Gauge(
    "tinkex_group_models",
    "Models of a worker group, if there are several.",
    ["group"],
    registry=REGISTRY,
)
SAMPLER_DRIFT_MEAN = Gauge(
    "tinkex_sampler_drift_mean",
    "Mean difference of log-probabilities sampled by vLLM from the trainer's, of recent samples.",
    ["base_model"],
    registry=REGISTRY,
)
SAMPLER_DRIFT_MAX = Gauge(
    "tinkex_sampler_drift_max",
    "Largest difference of log-probabilities sampled by vLLM from the trainer's.",
    ["base_model"],
    registry=REGISTRY,
)
GROUP_BUSY = Gauge(
    "tinkex_group_busy",
    "Fraction of time that the engine of a worker group was busy, if there are several.",
    ["group"],
    registry=REGISTRY,
)
GROUP_MOVES = Gauge(
    "tinkex_group_moves",
    "How often a group was given work of others.",
    ["group"],
    registry=REGISTRY,
)
GROUP_RESTARTS = Gauge(
    "tinkex_group_restarts",
    "How often the worker of a group was started again.",
    ["group"],
    registry=REGISTRY,
)
STORE_BYTES = Gauge("tinkex_store_bytes", "Size of the database.", registry=REGISTRY)
STORE_UP = Gauge("tinkex_store_up", "Whether the database is reachable.", registry=REGISTRY)


STREAMS_OPEN = Gauge(
    "tinkex_streams_open", "Samples whose tokens are streamed to clients.", registry=REGISTRY
)
STREAM_CONNECTIONS = Gauge(
    "tinkex_stream_connections",
    "Connections to workers that receive the tokens of running samples.",
    registry=REGISTRY,
)
FIRST_TOKEN = Histogram(
    "tinkex_stream_first_token_seconds",
    "Time from the submitted request to its first streamed token.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0),
    registry=REGISTRY,
)
NEXT_TOKEN = Histogram(
    "tinkex_stream_next_token_seconds",
    "Time between two parts of a stream.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
    registry=REGISTRY,
)
STREAMS_UNSTREAMED = Counter(
    "tinkex_streams_from_store",
    "Streams whose tokens all came from the stored result, because none arrived before.",
    registry=REGISTRY,
)
STREAMS_CANCELLED = Counter(
    "tinkex_requests_cancelled",
    "Inference requests that were cancelled because their client has disconnected.",
    registry=REGISTRY,
)


class StreamMetrics(StreamObserver):
    """Measures the token streams of this process."""

    def count_open(self, change: int) -> None:
        """Streams were opened or closed."""
        STREAMS_OPEN.inc(change)

    def count_connections(self, change: int) -> None:
        """Connections to workers were opened or closed."""
        STREAM_CONNECTIONS.inc(change)

    def count_unstreamed(self) -> None:
        """All tokens of a stream came from the stored result."""
        STREAMS_UNSTREAMED.inc()

    def count_cancelled(self) -> None:
        """A job was cancelled because its client has disconnected."""
        STREAMS_CANCELLED.inc()

    def observe_first_token(self, seconds: float) -> None:
        """The time from the begin of a stream to its first token."""
        FIRST_TOKEN.observe(seconds)

    def observe_next_token(self, seconds: float) -> None:
        """The time between two arrivals of tokens."""
        NEXT_TOKEN.observe(seconds)


class RequestMetrics:
    """Counts the requests of one endpoint."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._seconds = LATENCY.labels(endpoint)
        self._by_status: dict[int, Counter] = {}

    def observe(self, status: int, seconds: float) -> None:
        """Count one response."""
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = REQUESTS.labels(self._endpoint, str(status))
        counter.inc()
        self._seconds.observe(seconds)


def render_metrics(stats: StoreStats | None, now: float) -> bytes:
    """All metrics in the Prometheus text format; `stats` is None if the store is unavailable."""
    API_PROCESS.labels(str(os.getpid())).set(1)
    STORE_UP.set(stats is not None)
    if stats is not None:
        oldest = stats.oldest_waiting_at
        JOBS_WAITING.set(stats.num_waiting)
        JOBS_RUNNING.set(stats.num_running)
        OLDEST_WAITING.set(0.0 if oldest is None else max(now - oldest, 0.0))
        SESSIONS_ACTIVE.set(stats.num_sessions)
        WORKERS_ALIVE.set(stats.num_workers)
        STORE_BYTES.set(stats.store_bytes)
        _set_by_label(GROUP_QUEUED, stats.queued_seconds)
        _set_by_label(GROUP_MODELS, stats.num_models)
        _set_by_label(SAMPLER_DRIFT_MEAN, stats.drift_mean)
        _set_by_label(SAMPLER_DRIFT_MAX, stats.drift_max)
        _set_by_label(GROUP_BUSY, stats.busy)
        _set_by_label(GROUP_MOVES, stats.num_moves)
        _set_by_label(GROUP_RESTARTS, stats.num_restarts)
    return generate_latest(REGISTRY)


def _set_by_label(gauge: Gauge, values: Mapping[str, float]) -> None:
    gauge.clear()
    for label, value in values.items():
        gauge.labels(label or "default").set(value)
