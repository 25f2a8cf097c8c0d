from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.conftest import TIMEOUT_SECONDS, eventually
from tests.support.server_harness import OTHER_KEY, ServerHarness, open_harness
from tinkex.jobs import future_waiters
from tinkex.jobs.wakeup import WakeupListener
from tinkex.server import app as server_app
from tinkex.store import jobs, samplers
from tinkex.store.jobs import CLONE_STRIDE
from tinkex.store.records import JobRecord, SamplerRecord
from tinkex.types import ForwardBackwardOutput, SampledSequence, SampleResponse, TensorData
from tinkex.wire.proto import (
    decode_forward_backward_output,
    encode_forward_backward_output,
    encode_sample_response,
)

PROTO = "application/x-protobuf"
ASKS_PROTO = {"Accept": PROTO}
OUTPUT = ForwardBackwardOutput(
    "TorchLossReturn",
    [{"logprobs": TensorData([-0.5, -0.25], "float32")}],
    {"loss:sum": 0.75},
)


def retrieve(harness: ServerHarness, job: JobRecord, **options: Any) -> Any:
    is_size_enough = options.pop("allow_metadata_only", False)
    body = {"request_id": job.id, "allow_metadata_only": is_size_enough}
    return harness.post("/retrieve_future", body, **options)


@pytest.fixture
def long_poll_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerHarness]:
    """A server with long polls that end only by a wake-up message."""
    monkeypatch.setattr(future_waiters, "POLL_SECONDS", 3600.0)
    with open_harness(tmp_path / "home", long_poll_seconds=40.0) as opened:
        yield opened


# --- one promise ---------------------------------------------------------------------------
def test_json_result_is_returned_unchanged(harness: ServerHarness) -> None:
    job = harness.submit_job()
    harness.finish(job, b'{"metrics": {"a": 1.0}}')

    answer = retrieve(harness, job)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == b'{"metrics": {"a": 1.0}}'


@pytest.mark.parametrize("kind", ["forward_backward", "forward", "asample"])
def test_protobuf_result_is_returned_unchanged(harness: ServerHarness, kind: str) -> None:
    job = harness.submit_job(kind)
    harness.finish(job, b"any bytes at all")

    answer = retrieve(harness, job, headers=ASKS_PROTO)

    assert answer.headers["content-type"] == PROTO
    assert answer.content == b"any bytes at all"


def test_result_is_converted_to_json_without_protobuf_accept(harness: ServerHarness) -> None:
    job = harness.submit_job("forward_backward")
    harness.finish(job, encode_forward_backward_output(OUTPUT))

    answer = retrieve(harness, job, headers={"Accept": "application/json"})

    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["metrics"] == {"loss:sum": 0.75}
    assert body["loss_fn_outputs"][0]["logprobs"]["data"] == [-0.5, -0.25]


def test_sample_result_is_converted_to_json(harness: ServerHarness) -> None:
    sequence = SampledSequence(
        stop_reason="stop",
        sequence_id="",
        tokens_np=np.array([1, 2], "int32"),
        logprobs_np=np.array([-1.0, -2.0], "float32"),
    )
    job = harness.submit_job("asample")
    harness.finish(job, encode_sample_response(SampleResponse(sequences=[sequence])))

    body = retrieve(harness, job, headers={"Accept": "application/json"}).json()

    assert body["sequences"][0]["tokens"] == [1, 2]
    assert body["sequences"][0]["stop_reason"] == "stop"


def test_non_finite_result_is_converted_to_json(harness: ServerHarness) -> None:
    broken = ForwardBackwardOutput(
        "TorchLossReturn",
        [{"logprobs": TensorData([float("-inf"), -1.0], "float32")}],
        {"loss:sum": float("nan")},
    )
    job = harness.submit_job("forward_backward")
    harness.finish(job, encode_forward_backward_output(broken))

    answer = retrieve(harness, job, headers={"Accept": "application/json"})

    assert answer.status_code == 200
    assert answer.json()["metrics"] == {"loss:sum": None}


def test_failed_job_returns_error_and_category(harness: ServerHarness) -> None:
    job = harness.submit_job("forward_backward")
    harness.finish(job, error="token 7 is too large")

    answer = retrieve(harness, job, headers=ASKS_PROTO)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"] == "token 7 is too large"
    assert answer.json()["category"] == "user"


def test_large_result_returns_size_on_request(tmp_path: Path) -> None:
    with open_harness(tmp_path, inline_result_bytes=10) as harness:
        small, large = harness.submit_job("asample"), harness.submit_job("asample")
        harness.finish(small, b"x" * 10)
        harness.finish(large, b"x" * 11)

        metadata = retrieve(harness, large, allow_metadata_only=True, headers=ASKS_PROTO)
        assert metadata.json() == {"status": "complete_metadata", "response_payload_size": 11}
        assert retrieve(harness, large, headers=ASKS_PROTO).content == b"x" * 11
        short = retrieve(harness, small, allow_metadata_only=True, headers=ASKS_PROTO)
        assert short.content == b"x" * 10


@pytest.mark.parametrize("request_id", ["made-up", "", "a-b", "x" * 5000, "😀"])
def test_unknown_future_returns_404(harness: ServerHarness, request_id: str) -> None:
    answer = harness.post("/retrieve_future", {"request_id": request_id})

    assert answer.status_code == 404
    assert answer.json()["error"] == f"future {request_id!r} does not exist"


def test_other_tenants_future_returns_404(harness: ServerHarness) -> None:
    job = harness.submit_job()
    harness.finish(job)

    answer = retrieve(harness, job, key=OTHER_KEY)

    assert (answer.status_code, answer.json()["error"]) == (
        404,
        f"future {job.id!r} does not exist",
    )


def test_expired_future_returns_410(harness: ServerHarness) -> None:
    job = harness.submit_job()
    forged = job.id[:-1] + ("0" if job.id[-1] != "0" else "1")
    harness.write(lambda db: db.exec_driver_sql("DELETE FROM jobs"))

    assert retrieve(harness, job).status_code == 410
    assert retrieve(harness, job, key=OTHER_KEY).status_code == 404
    assert harness.post("/retrieve_future", {"request_id": forged}).status_code == 404


def test_dropped_result_returns_410(harness: ServerHarness) -> None:
    job = harness.submit_job()
    harness.finish(job, None)

    answer = retrieve(harness, job)

    assert answer.status_code == 410
    assert "submit the request again" in answer.json()["error"]


# --- waiting -------------------------------------------------------------------------------
def test_wakeup_message_ends_long_poll(long_poll_harness: ServerHarness) -> None:
    job = long_poll_harness.submit_job()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(retrieve, long_poll_harness, job)
        eventually(lambda: long_poll_harness.services.waiters.num_waiting == 1)
        long_poll_harness.finish(job, b'{"metrics": null}')
        answer = asked.result(TIMEOUT_SECONDS)

    assert answer.content == b'{"metrics": null}'


def test_long_poll_without_wakeup_finds_result_by_polling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(future_waiters, "POLL_SECONDS", 0.01)
    with open_harness(tmp_path, long_poll_seconds=40.0) as harness, ThreadPoolExecutor() as pool:
        job = harness.submit_job()
        asked = pool.submit(retrieve, harness, job)
        eventually(lambda: harness.services.waiters.num_waiting == 1)
        harness.finish(job, b"{}", ring=False)
        assert asked.result(TIMEOUT_SECONDS).status_code == 200


def test_long_poll_timeout_returns_pending(harness: ServerHarness) -> None:
    listener = WakeupListener(harness.services.database, "worker")
    try:
        answer = retrieve(harness, harness.submit_job())
    finally:
        listener.close()

    assert answer.status_code == 408
    assert answer.json()["queue_state"] == "active"
    assert "queue_state_reason" not in answer.json()


def test_queue_state_is_paused_without_worker(harness: ServerHarness) -> None:
    answer = retrieve(harness, harness.submit_job())

    assert answer.status_code == 408
    assert answer.json()["queue_state"] == "paused_capacity"
    assert "no worker" in answer.json()["queue_state_reason"]


def test_queue_state_reports_long_queue(tmp_path: Path) -> None:
    with open_harness(tmp_path, max_jobs_per_tenant=4) as harness:
        listener = WakeupListener(harness.services.database, "worker")
        job_list = [harness.submit_job() for _ in range(3)]
        answer = retrieve(harness, job_list[0])
        listener.close()

    assert answer.json()["queue_state"] == "paused_capacity"
    assert answer.json()["queue_state_reason"].startswith("3 of your requests are waiting")


def test_shutdown_releases_long_polls(long_poll_harness: ServerHarness) -> None:
    job = long_poll_harness.submit_job()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(retrieve, long_poll_harness, job)
        eventually(lambda: long_poll_harness.services.waiters.num_waiting == 1)
        portal = long_poll_harness.client.blocking_portal
        portal.call(long_poll_harness.services.waiters.release_all)
        assert asked.result(TIMEOUT_SECONDS).status_code == 408


def test_fetched_at_is_written_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_app, "FLUSH_SECONDS", 3600.0)
    with open_harness(tmp_path) as harness:
        fetched = [harness.submit_job() for _ in range(3)]
        announced, unread = harness.submit_job(), harness.submit_job()
        for job in (*fetched, announced, unread):
            harness.finish(job)
        for job in fetched:
            retrieve(harness, job)
        assert harness.services.cache.fetched_job_ids == {job.id for job in fetched}
        assert _fetched_at(harness, fetched[0]) is None

        server_app.flush_fetched(harness.services)
        eventually(lambda: all(_fetched_at(harness, job) for job in fetched))

        assert _fetched_at(harness, unread) is None
        assert not harness.services.cache.fetched_job_ids


def _fetched_at(harness: ServerHarness, job: JobRecord) -> float | None:
    job_record = harness.read(lambda db: jobs.find(db, job.id))
    at: float | None = job_record.fetched_at
    return at


# --- many promises -------------------------------------------------------------------------
SAMPLER_ID = "s:sample:0"


def _open_sampler(harness: ServerHarness, tenant_id: str | None = None) -> None:
    session_id = harness.session() if tenant_id is None else harness.session(OTHER_KEY)
    sampler = SamplerRecord(
        id=SAMPLER_ID,
        tenant_id=tenant_id or harness.tenant_id,
        session_id=session_id,
        base_model="b",
        model_path=None,
        checkpoint_id=None,
        created_at=time.time(),
    )
    harness.write(lambda db: samplers.insert(db, sampler))


def _sample(harness: ServerHarness, number: int) -> JobRecord:
    return harness.submit_job("asample", sampler_id=SAMPLER_ID, position=number, num_sequences=1)


def _completions(harness: ServerHarness, cursor: int = 0, clone: int = 0, **options: Any) -> Any:
    key = options.pop("key", None)
    body = {
        "target": {
            "type": "sampling_session",
            "sampling_session_id": SAMPLER_ID,
            "cloned_sampler_id": clone,
        },
        "prev_cursor": cursor,
        "retrieved_request_ids": [],
        **options,
    }
    return harness.post("/retrieve_futures", body, **({"key": key} if key else {}))


def test_completions_are_ordered_and_returned_once_per_cursor(harness: ServerHarness) -> None:
    _open_sampler(harness)
    first, second = _sample(harness, 0), _sample(harness, 1)
    harness.finish(second, b"12345")
    harness.finish(first, error="no")

    answer = _completions(harness).json()

    assert answer["completions"] == [
        {
            "state": "finished",
            "request_id": second.id,
            "response_payload_uncompressed_size": 5,
        },
        {"state": "failed", "request_id": first.id},
    ]
    again = _completions(harness, answer["cursor"], timeout=0.0).json()
    assert again == {"completions": [], "cursor": answer["cursor"]}


def test_clones_receive_only_their_completions(harness: ServerHarness) -> None:
    _open_sampler(harness)
    mine, theirs = _sample(harness, 0), _sample(harness, 7 * CLONE_STRIDE + 3)
    harness.finish(mine)
    harness.finish(theirs)

    assert [done["request_id"] for done in _completions(harness).json()["completions"]] == [mine.id]
    seen = _completions(harness, clone=7).json()["completions"]
    assert [done["request_id"] for done in seen] == [theirs.id]


def test_acknowledged_completions_are_dropped(harness: ServerHarness) -> None:
    _open_sampler(harness)
    job = _sample(harness, 0)
    harness.finish(job)

    _completions(harness, retrieved_request_ids=[job.id], timeout=0.0)

    assert _completions(harness, timeout=0.0).json()["completions"] == []


def test_completion_wakes_batched_poll(long_poll_harness: ServerHarness) -> None:
    _open_sampler(long_poll_harness)
    job = _sample(long_poll_harness, 0)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(_completions, long_poll_harness)
        eventually(lambda: long_poll_harness.services.waiters.num_subscribed_to_all == 1)
        long_poll_harness.finish(job)
        answer = asked.result(TIMEOUT_SECONDS)

    assert [done["request_id"] for done in answer.json()["completions"]] == [job.id]


def test_unrelated_completion_does_not_end_batched_poll(long_poll_harness: ServerHarness) -> None:
    _open_sampler(long_poll_harness)
    job, stranger = _sample(long_poll_harness, 0), long_poll_harness.submit_job()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(_completions, long_poll_harness)
        eventually(lambda: long_poll_harness.services.waiters.num_subscribed_to_all == 1)
        long_poll_harness.finish(stranger)
        long_poll_harness.finish(job)
        answer = asked.result(TIMEOUT_SECONDS)

    assert [done["request_id"] for done in answer.json()["completions"]] == [job.id]


def test_batched_poll_returns_empty_on_timeout(harness: ServerHarness) -> None:
    _open_sampler(harness)

    assert _completions(harness).json() == {"completions": [], "cursor": 0}


def test_shutdown_releases_batched_polls(
    long_poll_harness: ServerHarness,
) -> None:
    _open_sampler(long_poll_harness)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(_completions, long_poll_harness)
        eventually(lambda: long_poll_harness.services.waiters.num_subscribed_to_all == 1)
        long_poll_harness.client.blocking_portal.call(
            long_poll_harness.services.waiters.release_all
        )
        assert asked.result(TIMEOUT_SECONDS).json() == {"completions": [], "cursor": 0}


@pytest.mark.parametrize("is_foreign", [True, False])
def test_batched_poll_excludes_other_tenants(harness: ServerHarness, is_foreign: bool) -> None:
    if is_foreign:
        _open_sampler(harness, harness.other_tenant_id)

    answer = _completions(harness)

    assert answer.status_code == 404
    assert answer.json()["error"] == f"sampling session {SAMPLER_ID!r} does not exist"


@pytest.mark.parametrize(
    "odd", [{"prev_cursor": -1}, {"prev_cursor": 1 << 70}, {"timeout": -5.0}, {"timeout": 1e300}]
)
def test_unusual_poll_values_return_200_or_422(harness: ServerHarness, odd: dict[str, Any]) -> None:
    _open_sampler(harness)

    assert _completions(harness, **{"timeout": 0.0, **odd}).status_code in {200, 422}


# --- cancelling ----------------------------------------------------------------------------
def test_cancelled_sample_ends_long_poll(long_poll_harness: ServerHarness) -> None:
    job = long_poll_harness.submit_job("asample")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(retrieve, long_poll_harness, job)
        eventually(lambda: long_poll_harness.services.waiters.num_waiting == 1)
        cancelled = long_poll_harness.post("/cancel_future", {"request_id": job.id})
        answer = asked.result(TIMEOUT_SECONDS)

    assert cancelled.status_code == 200
    assert answer.json()["error"] == "the request was cancelled"
    assert long_poll_harness.post("/cancel_future", {"request_id": job.id}).status_code == 200


def test_training_job_cannot_be_cancelled(harness: ServerHarness) -> None:
    job = harness.submit_job("forward_backward")

    assert harness.post("/cancel_future", {"request_id": job.id}).status_code == 200
    harness.finish(job, encode_forward_backward_output(OUTPUT))

    result = retrieve(harness, job, headers=ASKS_PROTO).content
    assert decode_forward_backward_output(result) == OUTPUT


def test_other_tenants_sample_cannot_be_cancelled(harness: ServerHarness) -> None:
    job = harness.submit_job("asample")

    answer = harness.post("/cancel_future", {"request_id": job.id}, key=OTHER_KEY)

    assert answer.status_code == 404
    assert harness.read(lambda db: jobs.find(db, job.id)).is_finished is False
