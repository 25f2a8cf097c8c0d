from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.conftest import PATIENCE, eventually
from tests.support.server_harness import OTHER_KEY, House, open_house
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


def retrieve(house: House, job: JobRecord, **options: Any) -> Any:
    is_size_enough = options.pop("allow_metadata_only", False)
    body = {"request_id": job.id, "allow_metadata_only": is_size_enough}
    return house.post("/retrieve_future", body, **options)


@pytest.fixture
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """A house that holds questions for long, and where nobody looks unless a bell rings."""
    monkeypatch.setattr(future_waiters, "LOOK_SECONDS", 3600.0)
    with open_house(tmp_path / "home", long_poll_seconds=40.0) as opened:
        yield opened


# --- one promise ---------------------------------------------------------------------------
def test_a_json_result_passes_through_untouched(house: House) -> None:
    job = house.promise()
    house.finish(job, b'{"metrics": {"a": 1.0}}')

    answer = retrieve(house, job)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == b'{"metrics": {"a": 1.0}}'


@pytest.mark.parametrize("kind", ["forward_backward", "forward", "asample"])
def test_a_binary_result_passes_through_untouched(house: House, kind: str) -> None:
    job = house.promise(kind)
    house.finish(job, b"any bytes at all")

    answer = retrieve(house, job, headers=ASKS_PROTO)

    assert answer.headers["content-type"] == PROTO
    assert answer.content == b"any bytes at all"


def test_a_client_that_reads_no_protobuf_gets_the_json_twin(house: House) -> None:
    job = house.promise("forward_backward")
    house.finish(job, encode_forward_backward_output(OUTPUT))

    answer = retrieve(house, job, headers={"Accept": "application/json"})

    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["metrics"] == {"loss:sum": 0.75}
    assert body["loss_fn_outputs"][0]["logprobs"]["data"] == [-0.5, -0.25]


def test_samples_have_a_json_twin_too(house: House) -> None:
    sequence = SampledSequence(
        stop_reason="stop",
        sequence_id="",
        tokens_np=np.array([1, 2], "int32"),
        logprobs_np=np.array([-1.0, -2.0], "float32"),
    )
    job = house.promise("asample")
    house.finish(job, encode_sample_response(SampleResponse(sequences=[sequence])))

    body = retrieve(house, job, headers={"Accept": "application/json"}).json()

    assert body["sequences"][0]["tokens"] == [1, 2]
    assert body["sequences"][0]["stop_reason"] == "stop"


def test_a_result_without_finite_numbers_still_has_a_twin(house: House) -> None:
    broken = ForwardBackwardOutput(
        "TorchLossReturn",
        [{"logprobs": TensorData([float("-inf"), -1.0], "float32")}],
        {"loss:sum": float("nan")},
    )
    job = house.promise("forward_backward")
    house.finish(job, encode_forward_backward_output(broken))

    answer = retrieve(house, job, headers={"Accept": "application/json"})

    assert answer.status_code == 200
    assert answer.json()["metrics"] == {"loss:sum": None}


def test_a_failure_is_an_answer_with_a_reason_and_a_culprit(house: House) -> None:
    job = house.promise("forward_backward")
    house.finish(job, error="token 7 is too large")

    answer = retrieve(house, job, headers=ASKS_PROTO)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"] == "token 7 is too large"
    assert answer.json()["category"] == "user"


def test_a_large_result_is_announced_by_its_size_to_who_asks_for_that(tmp_path: Path) -> None:
    with open_house(tmp_path, inline_result_bytes=10) as house:
        small, large = house.promise("asample"), house.promise("asample")
        house.finish(small, b"x" * 10)
        house.finish(large, b"x" * 11)

        told = retrieve(house, large, allow_metadata_only=True, headers=ASKS_PROTO)
        assert told.json() == {"status": "complete_metadata", "response_payload_size": 11}
        assert retrieve(house, large, headers=ASKS_PROTO).content == b"x" * 11
        short = retrieve(house, small, allow_metadata_only=True, headers=ASKS_PROTO)
        assert short.content == b"x" * 10


@pytest.mark.parametrize("request_id", ["made-up", "", "a-b", "x" * 5000, "😀"])
def test_a_promise_that_never_was_is_404(house: House, request_id: str) -> None:
    answer = house.post("/retrieve_future", {"request_id": request_id})

    assert answer.status_code == 404
    assert answer.json()["error"] == f"there is no promise {request_id!r}"


def test_another_tenants_promise_is_no_promise(house: House) -> None:
    job = house.promise()
    house.finish(job)

    answer = retrieve(house, job, key=OTHER_KEY)

    assert (answer.status_code, answer.json()["error"]) == (
        404,
        f"there is no promise {job.id!r}",
    )


def test_a_promise_that_was_forgotten_is_410(house: House) -> None:
    job = house.promise()
    forged = job.id[:-1] + ("0" if job.id[-1] != "0" else "1")
    house.write(lambda db: db.exec_driver_sql("DELETE FROM jobs"))

    assert retrieve(house, job).status_code == 410
    assert retrieve(house, job, key=OTHER_KEY).status_code == 404
    assert house.post("/retrieve_future", {"request_id": forged}).status_code == 404


def test_a_result_that_was_dropped_is_410(house: House) -> None:
    job = house.promise()
    house.finish(job, None)

    answer = retrieve(house, job)

    assert answer.status_code == 410
    assert "submit the work again" in answer.json()["error"]


# --- waiting -------------------------------------------------------------------------------
def test_a_bell_wakes_who_waits(patient: House) -> None:
    job = patient.promise()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(retrieve, patient, job)
        eventually(lambda: patient.services.waiters.num_waiting == 1)
        patient.finish(job, b'{"metrics": null}')
        answer = asked.result(PATIENCE)

    assert answer.content == b'{"metrics": null}'


def test_without_a_bell_a_slow_look_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(future_waiters, "LOOK_SECONDS", 0.01)
    with open_house(tmp_path, long_poll_seconds=40.0) as house, ThreadPoolExecutor() as pool:
        job = house.promise()
        asked = pool.submit(retrieve, house, job)
        eventually(lambda: house.services.waiters.num_waiting == 1)
        house.finish(job, b"{}", ring=False)
        assert asked.result(PATIENCE).status_code == 200


def test_what_takes_longer_is_not_yet(house: House) -> None:
    bell = WakeupListener(house.services.database, "worker")
    try:
        answer = retrieve(house, house.promise())
    finally:
        bell.close()

    assert answer.status_code == 408
    assert answer.json()["queue_state"] == "active"
    assert "queue_state_reason" not in answer.json()


def test_without_a_worker_work_is_paused_and_the_reason_said(house: House) -> None:
    answer = retrieve(house, house.promise())

    assert answer.status_code == 408
    assert answer.json()["queue_state"] == "paused_capacity"
    assert "no worker" in answer.json()["queue_state_reason"]


def test_a_long_queue_is_a_reason_too(tmp_path: Path) -> None:
    with open_house(tmp_path, max_jobs_per_tenant=4) as house:
        bell = WakeupListener(house.services.database, "worker")
        promises = [house.promise() for _ in range(3)]
        answer = retrieve(house, promises[0])
        bell.close()

    assert answer.json()["queue_state"] == "paused_capacity"
    assert answer.json()["queue_state_reason"].startswith("3 of your requests are waiting")


def test_a_server_that_stops_lets_everybody_go(patient: House) -> None:
    job = patient.promise()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(retrieve, patient, job)
        eventually(lambda: patient.services.waiters.num_waiting == 1)
        portal = patient.client.blocking_portal
        portal.call(patient.services.waiters.release_all)
        assert asked.result(PATIENCE).status_code == 408


def test_fetched_results_are_noted_together_a_little_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_app, "FLUSH_SECONDS", 3600.0)
    with open_house(tmp_path) as house:
        fetched = [house.promise() for _ in range(3)]
        announced, unread = house.promise(), house.promise()
        for job in (*fetched, announced, unread):
            house.finish(job)
        for job in fetched:
            retrieve(house, job)
        assert house.services.cache.fetched_job_ids == {job.id for job in fetched}
        assert _fetched_at(house, fetched[0]) is None

        server_app.flush_fetched(house.services)
        eventually(lambda: all(_fetched_at(house, job) for job in fetched))

        assert _fetched_at(house, unread) is None
        assert not house.services.cache.fetched_job_ids


def _fetched_at(house: House, job: JobRecord) -> float | None:
    found = house.read(lambda db: jobs.find(db, job.id))
    at: float | None = found.fetched_at
    return at


# --- many promises -------------------------------------------------------------------------
SAMPLER_ID = "s:sample:0"


def _open_sampler(house: House, tenant_id: str | None = None) -> None:
    session_id = house.session() if tenant_id is None else house.session(OTHER_KEY)
    sampler = SamplerRecord(
        id=SAMPLER_ID,
        tenant_id=tenant_id or house.tenant_id,
        session_id=session_id,
        base_model="b",
        model_path=None,
        checkpoint_id=None,
        created_at=time.time(),
    )
    house.write(lambda db: samplers.insert(db, sampler))


def _sample(house: House, number: int) -> JobRecord:
    return house.promise("asample", sampler_id=SAMPLER_ID, position=number, num_sequences=1)


def _news(house: House, cursor: int = 0, clone: int = 0, **options: Any) -> Any:
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
    return house.post("/retrieve_futures", body, **({"key": key} if key else {}))


def test_completions_come_in_their_order_and_once_per_cursor(house: House) -> None:
    _open_sampler(house)
    first, second = _sample(house, 0), _sample(house, 1)
    house.finish(second, b"12345")
    house.finish(first, error="no")

    answer = _news(house).json()

    assert answer["completions"] == [
        {
            "state": "finished",
            "request_id": second.id,
            "response_payload_uncompressed_size": 5,
        },
        {"state": "failed", "request_id": first.id},
    ]
    again = _news(house, answer["cursor"], timeout=0.0).json()
    assert again == {"completions": [], "cursor": answer["cursor"]}


def test_clones_see_only_their_own(house: House) -> None:
    _open_sampler(house)
    mine, theirs = _sample(house, 0), _sample(house, 7 * CLONE_STRIDE + 3)
    house.finish(mine)
    house.finish(theirs)

    assert [done["request_id"] for done in _news(house).json()["completions"]] == [mine.id]
    seen = _news(house, clone=7).json()["completions"]
    assert [done["request_id"] for done in seen] == [theirs.id]


def test_what_was_retrieved_is_dropped(house: House) -> None:
    _open_sampler(house)
    job = _sample(house, 0)
    house.finish(job)

    _news(house, retrieved_request_ids=[job.id], timeout=0.0)

    assert _news(house, timeout=0.0).json()["completions"] == []


def test_news_wake_who_waits_for_any(patient: House) -> None:
    _open_sampler(patient)
    job = _sample(patient, 0)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(_news, patient)
        eventually(lambda: patient.services.waiters.num_subscribed_to_all == 1)
        patient.finish(job)
        answer = asked.result(PATIENCE)

    assert [done["request_id"] for done in answer.json()["completions"]] == [job.id]


def test_news_of_others_do_not_end_the_wait(patient: House) -> None:
    _open_sampler(patient)
    job, stranger = _sample(patient, 0), patient.promise()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(_news, patient)
        eventually(lambda: patient.services.waiters.num_subscribed_to_all == 1)
        patient.finish(stranger)
        patient.finish(job)
        answer = asked.result(PATIENCE)

    assert [done["request_id"] for done in answer.json()["completions"]] == [job.id]


def test_waiting_ends_with_the_long_poll(house: House) -> None:
    _open_sampler(house)

    assert _news(house).json() == {"completions": [], "cursor": 0}


def test_a_server_that_stops_lets_those_who_wait_for_news_go(patient: House) -> None:
    _open_sampler(patient)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(_news, patient)
        eventually(lambda: patient.services.waiters.num_subscribed_to_all == 1)
        patient.client.blocking_portal.call(patient.services.waiters.release_all)
        assert asked.result(PATIENCE).json() == {"completions": [], "cursor": 0}


@pytest.mark.parametrize("is_foreign", [True, False])
def test_another_tenants_samples_are_nobodys_news(house: House, is_foreign: bool) -> None:
    if is_foreign:
        _open_sampler(house, house.other_id)

    answer = _news(house)

    assert answer.status_code == 404
    assert answer.json()["error"] == f"there is no sampling session {SAMPLER_ID!r}"


@pytest.mark.parametrize(
    "odd", [{"prev_cursor": -1}, {"prev_cursor": 1 << 70}, {"timeout": -5.0}, {"timeout": 1e300}]
)
def test_odd_numbers_do_no_harm(house: House, odd: dict[str, Any]) -> None:
    _open_sampler(house)

    assert _news(house, **{"timeout": 0.0, **odd}).status_code in {200, 422}


# --- cancelling ----------------------------------------------------------------------------
def test_a_cancelled_sample_is_over_and_wakes_who_waits(patient: House) -> None:
    job = patient.promise("asample")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(retrieve, patient, job)
        eventually(lambda: patient.services.waiters.num_waiting == 1)
        cancelled = patient.post("/cancel_future", {"request_id": job.id})
        answer = asked.result(PATIENCE)

    assert cancelled.status_code == 200
    assert answer.json()["error"] == "the request was cancelled"
    assert patient.post("/cancel_future", {"request_id": job.id}).status_code == 200


def test_training_is_not_cancelled(house: House) -> None:
    job = house.promise("forward_backward")

    assert house.post("/cancel_future", {"request_id": job.id}).status_code == 200
    house.finish(job, encode_forward_backward_output(OUTPUT))

    result = retrieve(house, job, headers=ASKS_PROTO).content
    assert decode_forward_backward_output(result) == OUTPUT


def test_another_tenants_sample_cannot_be_cancelled(house: House) -> None:
    job = house.promise("asample")

    answer = house.post("/cancel_future", {"request_id": job.id}, key=OTHER_KEY)

    assert answer.status_code == 404
    assert house.read(lambda db: jobs.find(db, job.id)).is_over is False
