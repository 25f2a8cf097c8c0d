"""Run metrics over HTTP: paginated optimizer steps and the state of the run."""

from __future__ import annotations

import time
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.resources import create_ready_model
from tests.support.server_harness import OTHER_KEY, ServerHarness
from tinkex.jobs.job_types import JobKind
from tinkex.store import schema, sessions, steps
from tinkex.store.records import StepRecord

BEGAN = 1_700_000_000.0


def note(harness: ServerHarness, run_id: str, kind: JobKind, at: float, **fields: Any) -> None:
    """A step record, as the worker writes it."""
    known: dict[str, Any] = {
        "session_id": run_id.partition(":")[0],
        "run_id": run_id,
        "sampler_id": None,
        "kind": kind,
        "job_id": f"{kind}-{at}",
        "num_tokens": 0,
        "metrics": None,
        "queued_at": BEGAN + at,
        "started_at": BEGAN + at,
        "finished_at": BEGAN + at + 1,
    }
    harness.write(lambda db: steps.insert(db, StepRecord(**known | fields)))


def train(
    harness: ServerHarness, run_id: str, num_steps: int, first: int = 1, num_passes: int = 1
) -> None:
    for number in range(first, first + num_steps):
        for _ in range(num_passes):
            metrics = {"loss:sum": 20.0 * number, "entropy:mean": 1.0 * number, "peak:max": 3.0}
            note(
                harness,
                run_id,
                JobKind.FORWARD_BACKWARD,
                10 * number,
                num_tokens=10,
                metrics=metrics,
            )
        note(harness, run_id, JobKind.OPTIM_STEP, 10 * number + 1, metrics={"grad_norm": 0.5})


def send_request(harness: ServerHarness, run_id: str, query: str = "", **options: Any) -> Any:
    return harness.send_request("GET", f"/training_runs/{run_id}/metrics{query}", **options)


@pytest.fixture
def run_id(harness: ServerHarness) -> str:
    model_id = create_ready_model(harness, harness.session())
    note(harness, model_id, JobKind.CREATE_MODEL, 0)
    return model_id


def test_step_includes_preceding_passes(harness: ServerHarness, run_id: str) -> None:
    train(harness, run_id, 1, num_passes=3)
    note(harness, run_id, JobKind.FORWARD_BACKWARD, 90, num_tokens=10, metrics={"loss:sum": 5.0})

    metrics = send_request(harness, run_id).json()

    step = metrics["steps"][0]
    assert (step["step"], step["num_passes"], step["num_tokens"]) == (1, 3, 30)
    assert (step["loss"], step["seconds"]) == (2.0, 2.0)
    assert step["metrics"] == {
        "loss:sum": 60.0,
        "entropy:mean": 1.0,
        "peak:max": 3.0,
        "grad_norm": 0.5,
    }
    assert len(metrics["steps"]) == metrics["num_steps"] == 1
    assert metrics["is_whole"] is True
    assert metrics["tokens_per_second"] == pytest.approx(40 / 81)


def test_steps_are_paginated_without_gaps(harness: ServerHarness, run_id: str) -> None:
    train(harness, run_id, 7, num_passes=2)

    seen, after = [], 0
    while page := send_request(harness, run_id, f"?limit=3&after={after}").json()["steps"]:
        seen += page
        after = page[-1]["cursor"]

    assert [step["step"] for step in seen] == [1, 2, 3, 4, 5, 6, 7]
    assert [step["num_passes"] for step in seen] == [2] * 7


def test_no_cursor_returns_newest_steps(harness: ServerHarness, run_id: str) -> None:
    train(harness, run_id, 5)

    metrics = send_request(harness, run_id, "?limit=2").json()

    assert [(step["step"], step["loss"]) for step in metrics["steps"]] == [(4, 8.0), (5, 10.0)]
    assert (metrics["num_steps"], metrics["loss"]) == (5, 10.0)


def test_load_discards_pending_passes(harness: ServerHarness, run_id: str) -> None:
    note(harness, run_id, JobKind.FORWARD_BACKWARD, 1, num_tokens=10, metrics={"loss:sum": 5.0})
    note(harness, run_id, JobKind.LOAD_WEIGHTS, 2)
    train(harness, run_id, 1)

    assert send_request(harness, run_id).json()["steps"][0]["num_passes"] == 1


def test_non_finite_metrics_are_omitted(harness: ServerHarness, run_id: str) -> None:
    bad = {"loss:sum": float("nan"), "peak:max": float("inf"), "fine": 1.0}
    note(harness, run_id, JobKind.FORWARD_BACKWARD, 1, num_tokens=10, metrics=bad)
    note(harness, run_id, JobKind.OPTIM_STEP, 2)

    response = send_request(harness, run_id)

    assert response.status_code == 200
    step = response.json()["steps"][0]
    assert step["metrics"] == {"fine": 1.0}
    assert step.get("loss") is None


def test_queue_state_and_end_are_reported(harness: ServerHarness, run_id: str) -> None:
    for _ in range(2):
        harness.submit_job(run_id=run_id)
    metrics = send_request(harness, run_id).json()
    # The job that creates the model is unfinished too: no worker runs here.
    assert (metrics["num_waiting"], metrics["num_running"]) == (3, 0)
    assert (metrics["status"], metrics["steps"]) == ("active", [])

    session_id = run_id.partition(":")[0]
    harness.write(lambda db: sessions.finish(db, session_id, "success", None, time.time()))
    assert send_request(harness, run_id).json()["status"] == "finished"


def test_history_without_creation_is_marked_incomplete(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    train(harness, run_id, 1)
    assert send_request(harness, run_id).json()["is_whole"] is False


@pytest.mark.parametrize("query", ["?after=-1", "?limit=0", "?limit=1001", "?after=x", "?offset=1"])
def test_invalid_pages_are_rejected(harness: ServerHarness, run_id: str, query: str) -> None:
    assert send_request(harness, run_id, query).status_code == 422


def test_run_metrics_hidden_from_other_tenants(harness: ServerHarness, run_id: str) -> None:
    train(harness, run_id, 1)
    foreign, missing = send_request(harness, run_id, key=OTHER_KEY), send_request(harness, "nosuch")
    assert foreign.status_code == missing.status_code == 404
    assert foreign.json()["error"] == f"training run {run_id!r} does not exist"


def test_run_list_shows_name_state_step_and_metrics(harness: ServerHarness, run_id: str) -> None:
    train(harness, run_id, 3, num_passes=2)
    harness.write(lambda db: db.execute(sa.update(schema.jobs).values(finished_at=BEGAN)))
    harness.write(lambda db: sessions.finish(db, run_id.partition(":")[0], "errored", None, BEGAN))

    listed = harness.send_request("GET", "/training_runs").json()["training_runs"][0]

    newest = send_request(harness, run_id).json()
    assert listed == harness.send_request("GET", f"/training_runs/{run_id}").json()
    assert listed["state"] == newest["state"] == "failed"
    assert listed["step"] == newest["num_steps"] == newest["steps"][-1]["step"] == 3
    assert listed["metrics"] == {"loss": 6.0} | newest["steps"][-1]["metrics"]
    assert newest["loss"] == 6.0


def test_step_numbers_are_stable_after_retention(harness: ServerHarness, run_id: str) -> None:
    train(harness, run_id, 5)
    cursor = send_request(harness, run_id).json()["steps"][1]["cursor"]
    harness.write(lambda db: db.execute(sa.delete(schema.steps).where(schema.steps.c.no <= cursor)))

    for query in ("", "?after=0", "?limit=2", f"?after={cursor}"):
        metrics = send_request(harness, run_id, query).json()
        assert (metrics["num_steps"], metrics["is_whole"]) == (5, False)
        numbers = [step["step"] for step in metrics["steps"]]
        assert numbers == ([4, 5] if query == "?limit=2" else [3, 4, 5])


def report(harness: ServerHarness, run_id: str, seq_id: int, metrics: Any) -> Any:
    content = {"seq_id": seq_id, "metrics": metrics}
    return harness.send_request("POST", f"/training_runs/{run_id}/metrics", json=content)


def test_client_reported_metrics_are_attached_to_step(harness: ServerHarness, run_id: str) -> None:
    train(harness, run_id, 1)
    harness.write(lambda db: db.execute(sa.update(schema.steps).values(position=4)))
    train(harness, run_id, 1, first=2)

    assert report(harness, run_id, 4, {"reward": 0.5, "loss": 9.0}).status_code == 200
    assert report(harness, run_id, 4, {"kl": 0.25}).status_code == 200

    first, second = send_request(harness, run_id).json()["steps"]
    assert (first["loss"], first["metrics"]["reward"], first["metrics"]["kl"]) == (9.0, 0.5, 0.25)
    assert first["metrics"]["grad_norm"] == 0.5
    assert "reward" not in second["metrics"]


@pytest.mark.parametrize(
    ("seq_id", "metrics", "status"),
    [
        (5, {"reward": 1.0}, 404),
        (-1, {"reward": 1.0}, 422),
        (4, {}, 422),
        (4, {f"m{n}": 1.0 for n in range(65)}, 422),
        (4, {"": 1.0}, 422),
        (4, {"x" * 65: 1.0}, 422),
        (4, {"a\nb": 1.0}, 422),
        (4, {"reward": "high"}, 422),
    ],
)
def test_invalid_metrics_report_is_rejected(
    harness: ServerHarness, run_id: str, seq_id: int, metrics: Any, status: int
) -> None:
    train(harness, run_id, 1)
    harness.write(lambda db: db.execute(sa.update(schema.steps).values(position=4)))

    refused = report(harness, run_id, seq_id, metrics)

    assert refused.status_code == status, refused.text
    assert "reward" not in send_request(harness, run_id).json()["steps"][0]["metrics"]
