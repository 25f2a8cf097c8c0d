from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_harness import (
    BASE_MODEL,
    OTHER_KEY,
    ServerHarness,
    clear_base_models,
    open_harness,
    publish_empty_models,
)
from tinkex.store import sessions
from tinkex.store.database import Connection

SESSION = {"tags": ["a"], "user_metadata": {"k": "v"}, "sdk_version": "0.36.0"}


def test_capabilities_match_worker_models(harness: ServerHarness) -> None:
    answer = harness.send_request("GET", "/get_server_capabilities")

    assert answer.json() == {
        "supported_models": [
            {
                "model_name": BASE_MODEL,
                "max_context_length": 512,
                "trainable": True,
                "sampleable": True,
            }
        ]
    }


@pytest.mark.parametrize("publish", [clear_base_models, publish_empty_models])
def test_capabilities_empty_without_worker_or_models(
    harness: ServerHarness, publish: Callable[[Connection], None]
) -> None:
    harness.write(publish)

    assert harness.send_request("GET", "/get_server_capabilities").json() == {
        "supported_models": []
    }


def test_client_config_flags_overridden_by_settings(tmp_path: Path) -> None:
    flags = {"fwdbwd_max_chunk_len": 7, "parallel_fwdbwd_chunks": False}
    with open_harness(
        tmp_path, client_flags=flags, dynamic_flags={"refresh_interval_sec": 10}
    ) as harness:
        config = harness.post("/client/config", {"sdk_version": "0.36.0"}).json()
        dynamic = harness.post("/client/dynamic_config", {"sdk_version": "0.36.0"}).json()

    assert config == {"pjwt_auth_enabled": True, "custom_loss_server_side": True, **flags}
    assert dynamic == {"sample_cancel_enabled": True, "refresh_interval_sec": 10}


def test_client_config_allows_parallel_chunks_and_cancel(harness: ServerHarness) -> None:
    config = harness.post("/client/config", {"sdk_version": "0.36.0"}).json()
    dynamic = harness.post("/client/dynamic_config", {"sdk_version": "0.36.0"}).json()

    assert config["parallel_fwdbwd_chunks"] is True
    assert dynamic["sample_cancel_enabled"] is True


def test_session_stores_client_metadata(harness: ServerHarness) -> None:
    body = {**SESSION, "project_id": "p", "display_name": "My Run"}
    session_id = harness.post("/create_session", body).json()["session_id"]

    session = harness.read(lambda db: sessions.find(db, session_id))
    assert session.tenant_id == harness.tenant_id
    assert (session.tags, session.user_metadata) == (["a"], {"k": "v"})
    assert (session.project_id, session.display_name) == ("p", "My Run")


def test_session_without_project_uses_default(harness: ServerHarness) -> None:
    session_id = harness.session()

    assert harness.read(lambda db: sessions.find(db, session_id)).project_id == "default"


def test_repeated_create_session_returns_same_session(harness: ServerHarness) -> None:
    first, again, other = (
        harness.post("/create_session", SESSION, headers={"X-Idempotency-Key": key}).json()
        for key in ("one", "one", "two")
    )

    assert first == again
    assert first != other


def test_idempotency_keys_are_per_tenant(harness: ServerHarness) -> None:
    headers = {"X-Idempotency-Key": "one"}
    mine = harness.post("/create_session", SESSION, headers=headers).json()
    theirs = harness.post("/create_session", SESSION, headers=headers, key=OTHER_KEY).json()

    assert mine != theirs


def test_create_session_without_idempotency_key(harness: ServerHarness) -> None:
    assert harness.session() != harness.session()


def test_heartbeat_updates_and_revives_expired_session(harness: ServerHarness) -> None:
    session_id = harness.session()
    later = time.time() + 1000.0
    harness.write(lambda db: sessions.expire_unseen(db, unseen_since=later, now=later))
    before = harness.read(lambda db: sessions.find(db, session_id))
    assert before.expired_at is not None

    answer = harness.post("/session_heartbeat", {"session_id": session_id})

    assert answer.json() == {"type": "session_heartbeat"}
    after = harness.read(lambda db: sessions.find(db, session_id))
    assert after.expired_at is None
    assert after.seen_at > before.seen_at


def test_finished_session_rejects_heartbeat(harness: ServerHarness) -> None:
    session_id = harness.session()
    body = {"reason": {"type": "success"}, "detail": None}
    assert harness.post(f"/sessions/{session_id}/finish", body).status_code == 200

    answer = harness.post("/session_heartbeat", {"session_id": session_id})

    assert answer.status_code == 410
    assert "finished" in answer.json()["error"]


def test_first_finish_reason_is_kept(harness: ServerHarness) -> None:
    session_id = harness.session()
    for reason, detail in (("errored", "boom"), ("success", None)):
        body = {"reason": {"type": reason}, "detail": detail}
        assert harness.post(f"/sessions/{session_id}/finish", body).status_code == 200

    session = harness.read(lambda db: sessions.find(db, session_id))
    assert (session.finish_reason, session.finish_detail) == ("errored", "boom")


@pytest.mark.parametrize("is_foreign", [True, False])
def test_other_tenants_session_not_found(harness: ServerHarness, is_foreign: bool) -> None:
    session_id = harness.session(OTHER_KEY) if is_foreign else "made-up"
    finish = {"reason": {"type": "success"}}

    beat = harness.post("/session_heartbeat", {"session_id": session_id})
    end = harness.post(f"/sessions/{session_id}/finish", finish)

    for answer in (beat, end):
        assert answer.status_code == 404
        assert answer.json()["error"] == f"session {session_id!r} does not exist"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tags", "a"),
        ("tags", None),
        ("user_metadata", []),
        ("sdk_version", 1),
        ("project_id", "\x00"),
        ("project_id", "p" * 1000),
        ("display_name", "a\x00b"),
        ("user_metadata", {"k": "v" * 100_000}),
        ("tags", ["t" * 1000] * 17),
        ("display_name", "n" * 1025),
        ("sdk_version", "1" * 1025),
        ("type", "other"),
    ],
)
def test_invalid_session_body_is_rejected(harness: ServerHarness, field: str, value: Any) -> None:
    answer = harness.post("/create_session", {**SESSION, field: value})

    assert answer.status_code == 422, answer.text
    assert answer.json()["category"] == "user"


TELEMETRY = {"platform": "Linux", "sdk_version": "1", "session_id": "s", "process_uuid": "u"}


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"event": "GENERIC_EVENT", "event_name": "x", "event_data": {"x-api-key": "tml-secret"}}],
        [{"event": "FROM_THE_FUTURE", "odd": [1, 2]}],
        [{}],
    ],
)
def test_telemetry_of_any_version_is_accepted(harness: ServerHarness, events: list[Any]) -> None:
    answer = harness.post("/telemetry", {**TELEMETRY, "events": events})

    assert (answer.status_code, answer.json()) == (200, {"status": "accepted"})


def test_telemetry_is_counted_but_not_stored(harness: ServerHarness) -> None:
    secret = "tml-do-not-keep-me"
    event = {"event": "GENERIC_EVENT", "event_data": {"x-api-key": secret}}
    before = _counted(harness)

    harness.post("/telemetry", {**TELEMETRY, "events": [event, event]})

    assert _counted(harness) == before + 2
    stored = [path for path in harness.services.home.root.rglob("*") if path.is_file()]
    assert stored
    assert not [path for path in stored if secret.encode() in path.read_bytes()]


def _counted(harness: ServerHarness) -> float:
    text = harness.client.get("/metrics", headers={"X-API-Key": "tml-alice"}).text
    prefix = 'tinkex_telemetry_events_total{event="GENERIC_EVENT"} '
    lines = [line for line in text.splitlines() if line.startswith(prefix)]
    return float(lines[0].removeprefix(prefix)) if lines else 0.0


@pytest.mark.parametrize("body", [{}, {"events": "x"}, {"events": [1]}, []])
def test_invalid_telemetry_is_rejected(harness: ServerHarness, body: Any) -> None:
    assert harness.post("/telemetry", body).status_code == 422
