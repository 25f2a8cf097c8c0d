from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.resources import create_checkpoint, create_ready_model, publish_checkpoint
from tests.support.server_harness import (
    BASE_MODEL,
    KEY,
    OTHER_KEY,
    ServerHarness,
    publish_models,
)
from tinkex.store import checkpoints, jobs, samplers, sessions

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}


def open_sampler(harness: ServerHarness, session_id: str, key: str = KEY, **fields: Any) -> Any:
    body = {"session_id": session_id, "sampling_session_seq_id": 0, **fields}
    return harness.post("/create_sampling_session", body, key=key)


def base_sampler(harness: ServerHarness, session_id: str | None = None) -> str:
    answer = open_sampler(harness, session_id or harness.session(), base_model=BASE_MODEL)
    assert answer.status_code == 200, answer.text
    sampler_id: str = answer.json()["sampling_session_id"]
    return sampler_id


def sample(harness: ServerHarness, key: str = KEY, **fields: Any) -> Any:
    body = {"num_samples": 1, "prompt": PROMPT, "sampling_params": {"max_tokens": 4}, **fields}
    return harness.post("/asample", body, key=key)


def test_sampling_session_is_created_once_per_seq_id(harness: ServerHarness) -> None:
    session_id = harness.session()

    first, second = (open_sampler(harness, session_id, base_model=BASE_MODEL) for _ in range(2))

    assert first.json() == second.json()
    assert first.json()["sampling_session_id"] == f"{session_id}:sample:0"
    assert len(harness.read(lambda db: samplers.list_by_session(db, session_id))) == 1


@pytest.mark.parametrize("segment", ["weights", "sampler_weights"])
def test_both_kinds_of_weights_can_be_sampled(harness: ServerHarness, segment: str) -> None:
    session_id = harness.session()
    checkpoint = create_checkpoint(
        harness, create_ready_model(harness, session_id), segment=segment
    )

    answer = open_sampler(harness, session_id, model_path=str(checkpoint.path))

    sampler_id = answer.json()["sampling_session_id"]
    sampler = harness.read(lambda db: samplers.find(db, sampler_id))
    assert (sampler.checkpoint_id, sampler.base_model) == (checkpoint.id, BASE_MODEL)
    assert harness.send_request("GET", f"/samplers/{sampler_id}").json() == {
        "sampler_id": sampler_id,
        "base_model": BASE_MODEL,
        "model_path": str(checkpoint.path),
        "tokenizer_id": BASE_MODEL,
    }


def test_base_model_sampler_has_no_path(harness: ServerHarness) -> None:
    sampler_id = base_sampler(harness)

    sampler = harness.send_request("GET", f"/samplers/{sampler_id}").json()

    assert sampler == {
        "sampler_id": sampler_id,
        "base_model": BASE_MODEL,
        "tokenizer_id": BASE_MODEL,
    }


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({}, 422, "needs base_model or model_path"),
        ({"base_model": "other"}, 400, f"'other' cannot be sampled here; available: {BASE_MODEL}"),
        ({"model_path": "x"}, 422, "Invalid tinker path"),
        (
            {"model_path": "tinker://x/weights/y"},
            404,
            "checkpoint 'tinker://x/weights/y' does not exist",
        ),
        ({"base_model": BASE_MODEL, "sampling_session_seq_id": -1}, 422, "expected 0 to"),
    ],
)
def test_sampling_session_requires_model_or_path(
    harness: ServerHarness, fields: dict[str, Any], status: int, words: str
) -> None:
    answer = open_sampler(harness, harness.session(), **fields)

    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_exported_weights_are_not_sampled(harness: ServerHarness) -> None:
    session_id = harness.session()
    checkpoint = create_checkpoint(
        harness, create_ready_model(harness, session_id), segment="external_weights"
    )

    answer = open_sampler(harness, session_id, model_path=str(checkpoint.path))

    assert answer.status_code == 400
    assert "is for other tools" in answer.json()["error"]


def test_mismatched_base_model_is_rejected(harness: ServerHarness) -> None:
    session_id = harness.session()
    checkpoint = create_checkpoint(harness, create_ready_model(harness, session_id))

    answer = open_sampler(harness, session_id, model_path=str(checkpoint.path), base_model="other")

    assert answer.status_code == 400


def test_finished_session_keeps_existing_samplers(harness: ServerHarness) -> None:
    session_id = harness.session()
    base_sampler(harness, session_id)
    harness.write(lambda db: sessions.finish(db, session_id, "success", None, time.time()))

    again = open_sampler(harness, session_id, base_model=BASE_MODEL)
    fresh = open_sampler(harness, session_id, base_model=BASE_MODEL, sampling_session_seq_id=1)

    assert (again.status_code, fresh.status_code) == (200, 400)


def test_joining_clients_get_distinct_counters(harness: ServerHarness) -> None:
    sampler_id = base_sampler(harness)
    body = {"sampling_session_id": sampler_id}

    counters = [
        harness.post("/join_sampling_session", body).json()["client_counter"] for _ in range(3)
    ]

    assert counters == [1, 2, 3]


# --- samples -----------------------------------------------------------------------------------
def test_sample_response_lists_sequences(harness: ServerHarness) -> None:
    sampler_id = base_sampler(harness)

    future = sample(harness, sampling_session_id=sampler_id, seq_id=3, num_samples=2).json()

    request_id = future["request_id"]
    assert future == {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:0", f"{request_id}:1"],
    }
    job = harness.read(lambda db: jobs.find(db, request_id))
    assert (job.sampler_id, job.position, job.num_sequences) == (sampler_id, 3, 2)
    assert job.session_id == sampler_id.partition(":")[0]


def test_repeated_sample_returns_same_future(harness: ServerHarness) -> None:
    sampler_id = base_sampler(harness)

    answers = [sample(harness, sampling_session_id=sampler_id, seq_id=n).json() for n in (0, 0, 1)]

    assert answers[0] == answers[1] != answers[2]


def test_clone_seq_id_is_stored_as_position(harness: ServerHarness) -> None:
    sampler_id = base_sampler(harness)
    seq_id = 999_999_999 * 1_000_000_000 + 5

    future = sample(harness, sampling_session_id=sampler_id, seq_id=seq_id).json()

    job = harness.read(lambda db: jobs.find(db, future["request_id"]))
    assert job.position == seq_id


def test_sample_without_sampling_session(harness: ServerHarness) -> None:
    checkpoint = create_checkpoint(harness, create_ready_model(harness, harness.session()))

    base = sample(harness, base_model=BASE_MODEL)
    path = sample(harness, model_path=str(checkpoint.path))

    assert (base.status_code, path.status_code) == (200, 200)
    job = harness.read(lambda db: jobs.find(db, path.json()["request_id"]))
    assert (job.sampler_id, job.session_id, job.position) == (None, "", 0)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"num_samples": 0}, 422),
        ({"num_samples": 1025}, 422),
        ({"seq_id": -1}, 422),
        ({"seq_id": 2**63}, 422),
        ({"topk_prompt_logprobs": -1}, 422),
        ({"topk_sample_logprobs": -1}, 422),
        ({"prompt_alt_tokens_k": -1}, 422),
        ({"prompt_logprobs_last_n": 0}, 422),
        ({"sampling_params": {"max_tokens": 0}}, 422),
        ({"sampling_params": {"temperature": -1}}, 422),
        ({"sampling_params": {"max_tokens": 510}}, 422),
        ({"sampling_params": {"max_tokens": 4, "stop": [""]}}, 422),
        ({"prompt": {"chunks": []}}, 422),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [512]}]}}, 422),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 513}]}}, 422),
        ({"topk_sample_logprobs": 257}, 422),
        ({"prompt_logprobs_last_n": 3}, 422),
        ({"base_model": None}, 422),
        ({"base_model": "other"}, 400),
        ({"model_path": "tinker://x/weights/y", "base_model": None}, 404),
    ],
)
def test_invalid_sample_request_is_rejected_immediately(
    harness: ServerHarness, fields: dict[str, Any], status: int
) -> None:
    answer = sample(harness, **{"base_model": BASE_MODEL} | fields)

    assert answer.status_code == status
    assert harness.read(jobs.get_load).num_jobs == 0


def test_sample_accepts_1024_sequences(harness: ServerHarness) -> None:
    answer = sample(harness, base_model=BASE_MODEL, num_samples=1024)

    assert len(answer.json()["sample_sequence_ids"]) == 1024


def test_published_weights_of_others_can_be_sampled(harness: ServerHarness) -> None:
    checkpoint = create_checkpoint(harness, create_ready_model(harness, harness.session()))
    theirs = harness.session(OTHER_KEY)
    path = str(checkpoint.path)

    private = open_sampler(harness, theirs, OTHER_KEY, model_path=path)
    publish_checkpoint(harness, checkpoint)
    public = open_sampler(harness, theirs, OTHER_KEY, model_path=path)
    direct = sample(harness, OTHER_KEY, model_path=path)

    assert [answer.status_code for answer in (private, public, direct)] == [404, 200, 200]


def test_expired_weights_are_not_sampled(harness: ServerHarness) -> None:
    session_id = harness.session()
    checkpoint = create_checkpoint(harness, create_ready_model(harness, session_id))
    harness.write(lambda db: checkpoints.set_expiry(db, checkpoint.id, time.time() - 1))

    assert open_sampler(harness, session_id, model_path=str(checkpoint.path)).status_code == 404


def test_sampler_reports_tokenizer_of_model(harness: ServerHarness) -> None:
    model = {"name": BASE_MODEL, "max_context_tokens": 512, "tokenizer_id": "/models/mine"}
    harness.write(lambda db: publish_models(db, model))

    sampler = harness.send_request("GET", f"/samplers/{base_sampler(harness)}").json()

    assert sampler["tokenizer_id"] == "/models/mine"
