from __future__ import annotations

import json
from typing import Any

from tinkex.server.http.trace_export import EVENTS_PER_CHUNK, iter_trace_json, trace_events
from tinkex.store.records import JobRecord, SessionRecord, StepRecord

SESSION = SessionRecord(
    id="s",
    tenant_id="t",
    project_id="default",
    display_name="Night run",
    tags=[],
    user_metadata={},
    sdk_version="1",
    created_at=1000.0,
    seen_at=1000.0,
)


def step(job_id: str = "j", **fields: Any) -> StepRecord:
    values: dict[str, Any] = {
        "session_id": "s",
        "run_id": "s:train:0",
        "sampler_id": None,
        "kind": "forward_backward",
        "job_id": job_id,
        "num_tokens": 10,
        "metrics": {"loss:sum": 1.5},
        "queued_at": 1001.0,
        "started_at": 1002.0,
        "finished_at": 1004.0,
    }
    return StepRecord(**(values | fields))


def job(**fields: Any) -> JobRecord:
    values: dict[str, Any] = {
        "no": 1,
        "id": "open",
        "tenant_id": "t",
        "session_id": "s",
        "kind": "optim_step",
        "run_id": "s:train:0",
        "sampler_id": None,
        "position": 1,
        "state": "queued",
        "attempts": 0,
        "payload_bytes": 0,
        "is_proto": False,
        "result_bytes": 0,
        "error": None,
        "category": None,
        "applied": None,
        "num_sequences": 0,
        "created_at": 1005.0,
        "started_at": None,
        "finished_at": None,
        "fetched_at": None,
    }
    return JobRecord(**(values | fields))


def events(steps: list[StepRecord], waiting: list[JobRecord] | None = None) -> list[dict[str, Any]]:
    return list(trace_events(SESSION, steps, waiting or [], 1010.0))


def test_operation_has_queued_span_and_complete_event() -> None:
    trace = events([step()])

    assert [(event["ph"], event["name"]) for event in trace] == [
        ("M", "process_name"),
        ("M", "thread_name"),
        ("b", "forward_backward waits"),
        ("e", "forward_backward waits"),
        ("X", "forward_backward"),
        ("C", "loss s:train:0"),
        ("C", "tokens s:train:0"),
    ]
    bar = trace[4]
    assert (bar["ts"], bar["dur"], bar["tid"]) == (2_000_000, 2_000_000, trace[1]["tid"])
    assert bar["args"] == {"job_id": "j", "tokens": 10, "loss:sum": 1.5}
    assert trace[0]["args"] == {"name": "Night run"}


def test_samples_are_async_spans() -> None:
    pair = [
        step(job_id=name, run_id=None, sampler_id="s:sample:0", kind="asample", metrics=None)
        for name in ("one", "two")
    ]

    spans = [event for event in events(pair) if event.get("cat") == "running"]

    assert [(event["ph"], event["id"]) for event in spans] == [
        ("b", "running-one"),
        ("e", "running-one"),
        ("b", "running-two"),
        ("e", "running-two"),
    ]


def test_one_track_per_model_and_sampler() -> None:
    trace = events([step("a"), step("b", run_id="s:train:1"), step("c")], [job()])

    named = {event["tid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
    assert named == {0: "Night run", 1: "s:train:0", 2: "s:train:1"}


def test_unfinished_jobs_are_drawn_until_now() -> None:
    waiting = events([], [job()])[-2:]
    running = events([], [job(started_at=1006.0)])[-2:]

    assert [event["ts"] for event in waiting] == [5_000_000, 10_000_000]
    assert [event["ts"] for event in running] == [6_000_000, 10_000_000]
    assert running[0]["args"] == {"job_id": "open", "is_over": False}


def test_negative_durations_are_clamped() -> None:
    trace = events([step(queued_at=900.0, started_at=1003.0, finished_at=1002.0)])

    assert all(event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0 for event in trace)


def test_non_finite_metrics_are_omitted() -> None:
    trace = events([step(metrics={"loss:sum": float("nan"), "x:sum": float("inf")})])

    assert not any(event["name"].startswith("loss") for event in trace)
    json.dumps(trace, allow_nan=False)


def test_long_trace_is_valid_json_in_chunks() -> None:
    steps = [step(job_id=str(number)) for number in range(1000)]

    pieces = list(iter_trace_json(SESSION, trace_events(SESSION, steps, [], 1010.0)))

    assert len(pieces) > 2 + 5000 // EVENTS_PER_CHUNK - 2
    assert max(map(len, pieces)) < 400 * EVENTS_PER_CHUNK
    document = json.loads(b"".join(pieces))
    assert sum(event["ph"] == "X" for event in document["traceEvents"]) == 1000


def test_trace_of_empty_session() -> None:
    document = json.loads(b"".join(iter_trace_json(SESSION, iter(()))))

    assert document == {
        "displayTimeUnit": "ms",
        "otherData": {"session_id": "s", "started_at": 1000.0},
        "traceEvents": [],
    }
