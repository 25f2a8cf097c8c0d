"""Export a session as a trace in the Chrome trace event format, for Perfetto or chrome://tracing.

Every model and sampling session has a track. Operations of a model run one after another and are
complete events; samples and waiting times overlap, so they are async spans with ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeAlias

import msgspec

from tinkex.store.records import JobRecord, SessionRecord, StepRecord

TraceEvent: TypeAlias = dict[str, object]
#: Viewers show the whole session as one process.
TRACE_PID = 1
#: The track of jobs without a model or sampler.
OTHER_TRACK = "other"
#: Events per chunk of the response.
EVENTS_PER_CHUNK = 500


@dataclass(slots=True)
class _Tracks:
    """Assigns track numbers in order of first occurrence."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, name: str) -> tuple[int, bool]:
        """Return a track's number, and whether it is new."""
        number = self.numbers.get(name)
        if number is not None:
            return number, False
        self.numbers[name] = len(self.numbers) + 1
        return self.numbers[name], True


def trace_events(
    session: SessionRecord, steps: Iterable[StepRecord], waiting: Iterable[JobRecord], now: float
) -> Iterator[TraceEvent]:
    """All events of a session; times are in microseconds since its start."""
    yield _metadata_event("process_name", session.display_name or f"session {session.id}")
    tracks, begin = _Tracks(), session.created_at
    for step in steps:
        track, is_new = tracks.number(_track_name(step))
        if is_new:
            yield _metadata_event("thread_name", _track_name(step), track)
        yield from _step_events(step, track, begin)
    for job in waiting:
        track, is_new = tracks.number(_track_name(job))
        if is_new:
            yield _metadata_event("thread_name", _track_name(job), track)
        yield from _waiting_events(job, track, begin, now)


def _track_name(item: StepRecord | JobRecord) -> str:
    return item.run_id or item.sampler_id or OTHER_TRACK


def _metadata_event(kind: str, name: str, track: int = 0) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": TRACE_PID, "tid": track, "args": {"name": name}}


def _step_events(step: StepRecord, track: int, begin: float) -> Iterator[TraceEvent]:
    queued = _to_microseconds(step.queued_at - begin)
    started = _to_microseconds(step.started_at - begin)
    finished = max(started, _to_microseconds(step.finished_at - begin))
    yield from _span_events(f"{step.kind} waits", "queued", track, step.job_id, (queued, started))
    details = {"job_id": step.job_id, "tokens": step.num_tokens, **_finite_metrics(step)}
    if step.sampler_id is not None:
        yield from _span_events(
            step.kind, "running", track, step.job_id, (started, finished), details
        )
    else:
        yield _event("X", step.kind, track, started) | {
            "cat": "running",
            "dur": finished - started,
            "args": details,
        }
    yield from _counter_events(step, finished)


def _counter_events(step: StepRecord, at: int) -> Iterator[TraceEvent]:
    name = _track_name(step)
    metrics = _finite_metrics(step)
    if "loss:sum" in metrics:
        loss = metrics["loss:sum"]
        yield _event("C", f"loss {name}", 0, at) | {"args": {"loss": loss}}
    if step.num_tokens:
        yield _event("C", f"tokens {name}", 0, at) | {"args": {"tokens": step.num_tokens}}


def _waiting_events(job: JobRecord, track: int, begin: float, now: float) -> Iterator[TraceEvent]:
    """Events of an unfinished job, drawn until now."""
    queued, end = _to_microseconds(job.created_at - begin), _to_microseconds(now - begin)
    started = end if job.started_at is None else _to_microseconds(job.started_at - begin)
    yield from _span_events(f"{job.kind} waits", "queued", track, job.id, (queued, started))
    if job.started_at is not None:
        details = {"job_id": job.id, "is_over": False}
        yield from _span_events(job.kind, "running", track, job.id, (started, end), details)


def _span_events(
    name: str,
    category: str,
    track: int,
    job_id: str,
    times: tuple[int, int],
    details: TraceEvent | None = None,
) -> Iterator[TraceEvent]:
    common = {"cat": category, "id": f"{category}-{job_id}"}
    start, end = times
    yield _event("b", name, track, start) | common | {"args": details or {"job_id": job_id}}
    yield _event("e", name, track, max(start, end)) | common


def _event(phase: str, name: str, track: int, at: int) -> TraceEvent:
    return {"ph": phase, "name": name, "pid": TRACE_PID, "tid": track, "ts": at}


def _to_microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1_000_000))


def _finite_metrics(step: StepRecord) -> dict[str, float]:
    metrics = step.metrics or {}
    return {name: value for name, value in metrics.items() if isfinite(value)}


def iter_trace_json(session: SessionRecord, events: Iterable[TraceEvent]) -> Iterator[bytes]:
    """Yield the trace as JSON in chunks, so that a long one does not fill the memory."""
    metadata = msgspec.json.encode({"session_id": session.id, "started_at": session.created_at})
    yield b'{"displayTimeUnit":"ms","otherData":' + metadata + b',"traceEvents":['
    chunk: list[bytes] = []
    separator = b""
    for event in events:
        chunk.append(msgspec.json.encode(event))
        if len(chunk) >= EVENTS_PER_CHUNK:
            yield separator + b",".join(chunk)
            chunk, separator = [], b","
    if chunk:
        yield separator + b",".join(chunk)
    yield b"]}"
