from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa

from tests.support.resources import (
    checkpoint_url,
    create_checkpoint,
    create_model,
    create_ready_model,
    publish_checkpoint,
)
from tests.support.server_harness import BASE_MODEL, OTHER_KEY, ServerHarness
from tinkex.ids import PATH_SHAPE
from tinkex.store import accounting, checkpoints, runs, schema, sessions
from tinkex.store.records import RunState

HOUR = 3600


# --- runs --------------------------------------------------------------------------------------
def test_runs_are_listed_newest_first_in_pages(harness: ServerHarness) -> None:
    session_id = harness.session()
    made = [create_ready_model(harness, session_id, number) for number in range(5)]

    page = harness.send_request("GET", "/training_runs?limit=2&offset=1").json()

    assert [run["training_run_id"] for run in page["training_runs"]] == [made[3], made[2]]
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 5}
    everything = harness.send_request("GET", "/training_runs").json()
    assert everything["cursor"] == {"offset": 0, "limit": 20, "total_count": 5}


def test_run_shows_newest_checkpoints_and_metadata(harness: ServerHarness) -> None:
    create_model(harness, session_id := harness.session(), user_metadata={"n": 1, "s": "x"})
    run_id = f"{session_id}:train:0"
    create_checkpoint(harness, run_id, "old")
    newest = create_checkpoint(harness, run_id, "new")
    sampler = create_checkpoint(harness, run_id, "s", "sampler_weights")

    run = harness.send_request("GET", f"/training_runs/{run_id}").json()

    assert run["last_checkpoint"]["tinker_path"] == str(newest.path)
    assert run["last_sampler_checkpoint"]["tinker_path"] == str(sampler.path)
    assert run["user_metadata"] == {"n": "1", "s": "x"}
    assert (run["is_lora"], run["lora_rank"], run["corrupted"]) == (True, 4, False)
    assert run["model_owner"] == f"tml:user:{harness.tenant_id}"
    assert harness.send_request("GET", "/training_runs").json()["training_runs"] == [run]


def test_corrupted_run_is_marked(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    harness.write(lambda db: runs.set_state(db, run_id, RunState.CORRUPTED))

    assert harness.send_request("GET", f"/training_runs/{run_id}").json()["corrupted"] is True


def found_by(harness: ServerHarness, text: str) -> list[str]:
    answer = harness.send_request("GET", f"/training_runs?search={quote(text)}")
    assert answer.status_code == 200, answer.text
    page = answer.json()
    return [run["training_run_id"] for run in page["training_runs"]]


def test_run_search_by_id_prefix_or_name(
    harness: ServerHarness,
) -> None:
    create_model(harness, first := harness.session(), user_metadata={"name": "Blue whale"})
    create_model(harness, second := harness.session())
    named = sa.update(schema.sessions).where(schema.sessions.c.id == second)
    harness.write(lambda db: db.execute(named.values(search_name="whale song")))
    create_model(harness, third := harness.session(), user_metadata={"name": "100% \u00c9t\u00e9"})

    assert found_by(harness, first[:12]) == [f"{first}:train:0"]
    assert found_by(harness, "WHALE") == [f"{second}:train:0", f"{first}:train:0"]
    assert found_by(harness, "100%") == found_by(harness, "\u00c9t\u00e9") == [f"{third}:train:0"]
    assert found_by(harness, "_") == found_by(harness, "nothing") == []


def test_run_is_renamed_and_keeps_its_metadata(harness: ServerHarness) -> None:
    create_model(harness, session_id := harness.session(), user_metadata={"team": "red"})
    path = f"/training_runs/{session_id}:train:0"

    for name, shown in (("  first try ", "first try"), ("\u00fcber", "\u00fcber"), (None, None)):
        assert harness.send_request("PUT", f"{path}/name", json={"name": name}).status_code == 200
        run = harness.send_request("GET", path).json()
        assert run.get("name") == shown
        assert run["user_metadata"]["team"] == "red"
    for name in ("x" * 121, "two\nlines"):
        refused = harness.send_request("PUT", f"{path}/name", json={"name": name})
        assert (refused.status_code, "printable" in refused.text) == (422, True)


def test_runs_are_listed_by_project(harness: ServerHarness) -> None:
    session_id = harness.session()
    run_id = create_ready_model(harness, session_id)
    create_ready_model(harness, harness.session())

    assigned = harness.send_request(
        "PUT", f"/sessions/{session_id}/project", json={"project_id": "blue"}
    )

    assert assigned.status_code == 200
    listed = harness.send_request("GET", "/training_runs?project_id=blue").json()
    assert [run["training_run_id"] for run in listed["training_runs"]] == [run_id]
    assert listed["cursor"]["total_count"] == 1


def test_public_runs_of_others_are_listed_only_on_request(
    harness: ServerHarness,
) -> None:
    create_model(harness, session_id := harness.session(), user_metadata={"secret": "x"})
    run_id = f"{session_id}:train:0"
    shown = create_checkpoint(harness, run_id, "shown")
    create_checkpoint(harness, run_id, "private")
    theirs = {"key": OTHER_KEY}
    scope = "?access_scope=accessible"
    assert (
        harness.send_request("GET", f"/training_runs/{run_id}{scope}", **theirs).status_code == 404
    )

    publish_checkpoint(harness, shown)

    run = harness.send_request("GET", f"/training_runs/{run_id}{scope}", **theirs).json()
    assert run["last_checkpoint"]["tinker_path"] == str(shown.path)
    assert "user_metadata" not in run
    assert harness.send_request("GET", f"/training_runs{scope}", **theirs).json()[
        "training_runs"
    ] == [run]
    assert harness.send_request("GET", f"/training_runs/{run_id}", **theirs).status_code == 404
    assert harness.send_request("GET", "/training_runs", **theirs).json()["training_runs"] == []


# --- checkpoints ---------------------------------------------------------------------------------
def test_checkpoints_of_run_are_listed_newest_first(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    first = create_checkpoint(harness, run_id, "first", user_metadata={"k": "v"})
    second = create_checkpoint(
        harness, run_id, "second", "external_weights", expires_at=time.time() + 60
    )
    create_checkpoint(harness, run_id, ".ephemeral", "sampler_weights", is_ephemeral=True)

    listed = harness.send_request("GET", f"/training_runs/{run_id}/checkpoints").json()[
        "checkpoints"
    ]

    assert [row["tinker_path"] for row in listed] == [str(second.path), str(first.path)]
    assert listed[0]["checkpoint_type"] == "external"
    assert listed[0]["expires_at"] is not None
    assert listed[1] == {
        "checkpoint_id": "weights/first",
        "checkpoint_type": "training",
        "time": listed[1]["time"],
        "tinker_path": str(first.path),
        "size_bytes": first.size_bytes,
        "public": False,
        "user_metadata": {"k": "v"},
        "base_model": BASE_MODEL,
    }


def test_checkpoint_list_of_oldest_sdks(harness: ServerHarness) -> None:
    """Up to version 0.3.0 the path contains `models`."""
    run_id = create_ready_model(harness, harness.session())
    create_checkpoint(harness, run_id, "first")

    old, new = (
        harness.send_request("GET", f"/{prefix}/{run_id}/checkpoints").json()
        for prefix in ("models", "training_runs")
    )

    assert old == new
    assert [row["checkpoint_id"] for row in old["checkpoints"]] == ["weights/first"]


def test_user_checkpoints_are_paginated(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    made = [str(create_checkpoint(harness, run_id, f"c{number}").path) for number in range(4)]

    page = harness.send_request("GET", "/checkpoints?limit=3&offset=1").json()

    assert [row["tinker_path"] for row in page["checkpoints"]] == [made[2], made[1], made[0]]
    assert page["cursor"] == {"offset": 1, "limit": 3, "total_count": 4}


@pytest.mark.parametrize("version", ["0.6.0", "0.25.0", "0.27.0"])
def test_external_checkpoints_hidden_from_old_sdks(harness: ServerHarness, version: str) -> None:
    run_id = create_ready_model(harness, harness.session())
    names = ("weights", "external_weights", "sampler_weights", "external_weights", "weights")
    for number, segment in enumerate(names):
        create_checkpoint(harness, run_id, f"n{number}", segment)
    old = {"headers": {"X-Stainless-Package-Version": version}}

    ids = [
        [each["checkpoint_id"] for each in page["checkpoints"]]
        for page in (
            harness.send_request("GET", "/checkpoints?limit=2", **old).json(),
            harness.send_request("GET", "/checkpoints?limit=2&offset=2", **old).json(),
            harness.send_request("GET", f"/training_runs/{run_id}/checkpoints", **old).json(),
        )
    ]

    assert ids[0] == ["weights/n4", "sampler_weights/n2"]
    assert ids[1] == ["weights/n0"]
    assert ids[2] == ids[0] + ids[1]
    cursor = harness.send_request("GET", "/checkpoints?limit=2", **old).json()["cursor"]
    assert cursor == {"offset": 0, "limit": 2, "total_count": 3}


def test_sdk_version_of_session_is_fallback(harness: ServerHarness) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.25.0"}
    session_id = harness.post("/create_session", body).json()["session_id"]
    run_id = create_ready_model(harness, session_id)
    create_checkpoint(harness, run_id, "x", "external_weights")
    url = f"/training_runs/{run_id}/checkpoints"
    new = {"headers": {"User-Agent": "AsyncTinker/Python 0.28.0"}}

    assert harness.send_request("GET", url).json()["checkpoints"] == []
    assert len(harness.send_request("GET", url, **new).json()["checkpoints"]) == 1
    assert harness.send_request("GET", "/checkpoints").json()["cursor"]["total_count"] == 1


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "offset=-1", "offset=1e3", "limit=5&limit=6"]
)
@pytest.mark.parametrize("path", ["/training_runs", "/checkpoints", "/sessions"])
def test_page_limits_are_enforced(harness: ServerHarness, path: str, query: str) -> None:
    assert harness.send_request("GET", f"{path}?{query}").status_code == 422


@pytest.mark.parametrize("given", ["0001", "run/weights/0001", "weights", "tinker://r/weights/1"])
def test_bare_checkpoint_id_error_shows_expected_format(harness: ServerHarness, given: str) -> None:
    run_id = create_ready_model(harness, harness.session())
    answer = harness.send_request("DELETE", f"/training_runs/{run_id}/checkpoints/{given}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error.startswith(f"checkpoint {given!r} does not exist; a checkpoint id is <weights|")
    assert error.endswith(f"and a whole path {PATH_SHAPE}")


def test_deleted_checkpoint_disappears_immediately(harness: ServerHarness) -> None:
    checkpoint = create_checkpoint(harness, create_ready_model(harness, harness.session()))

    first = harness.send_request("DELETE", checkpoint_url(checkpoint))
    second = harness.send_request("DELETE", checkpoint_url(checkpoint))

    assert (first.status_code, second.status_code) == (200, 404)
    assert harness.send_request("GET", "/checkpoints").json()["checkpoints"] == []


def test_publishing_twice_is_non_retryable_conflict(
    harness: ServerHarness,
) -> None:
    checkpoint = create_checkpoint(harness, create_ready_model(harness, harness.session()))
    url = checkpoint_url(checkpoint, "/publish")

    answers = [harness.send_request(method, url) for method in ("POST", "POST", "DELETE", "DELETE")]

    assert [answer.status_code for answer in answers] == [200, 409, 200, 409]
    assert answers[1].headers["x-should-retry"] == "false"
    assert answers[1].json()["error"] == f"{checkpoint.path} is public already"


def test_ttl_is_set_and_removed(harness: ServerHarness) -> None:
    checkpoint = create_checkpoint(harness, create_ready_model(harness, harness.session()))
    url = checkpoint_url(checkpoint, "/ttl")

    def expiry() -> Any:
        return harness.read(lambda db: checkpoints.find_by_id(db, checkpoint.id, 0)).expires_at

    assert harness.send_request("PUT", url, json={"ttl_seconds": 60}).status_code == 200
    assert time.time() < expiry() <= time.time() + 60
    assert harness.send_request("PUT", url, json={"ttl_seconds": None}).status_code == 200
    assert expiry() is None
    for wrong in (0, -1, 10 * 366 * 24 * HOUR, "x"):
        assert harness.send_request("PUT", url, json={"ttl_seconds": wrong}).status_code == 422


# --- sessions ------------------------------------------------------------------------------------
def test_sessions_are_listed_newest_first_in_pages(harness: ServerHarness) -> None:
    made = [harness.session() for _ in range(3)]
    harness.session(OTHER_KEY)

    listed = harness.send_request("GET", "/sessions?limit=2&access_scope=accessible").json()

    assert listed == {"sessions": [made[2], made[1]]}
    assert harness.send_request("GET", "/sessions?offset=2").json() == {"sessions": [made[0]]}


def test_session_lists_runs_and_samplers(harness: ServerHarness) -> None:
    body = {
        "tags": [],
        "user_metadata": {"n": 1},
        "sdk_version": "1",
        "display_name": "Night run",
    }
    session_id = harness.post("/create_session", body).json()["session_id"]
    run_id = create_ready_model(harness, session_id)
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler_id = harness.post("/create_sampling_session", sampler).json()["sampling_session_id"]

    assert harness.send_request("GET", f"/sessions/{session_id}").json() == {
        "training_run_ids": [run_id],
        "sampler_ids": [sampler_id],
        "user_metadata": {"n": "1"},
        "display_name": "Night run",
    }


def test_session_search_by_state_with_cursor(
    harness: ServerHarness,
) -> None:
    made = [harness.session() for _ in range(5)]
    harness.write(lambda db: sessions.finish(db, made[0], "errored", "oops", time.time()))
    harness.write(lambda db: sessions.expire_unseen(db, unseen_since=0, now=time.time()))
    create_checkpoint(harness, create_ready_model(harness, made[4]))

    first = harness.post("/sessions/search", {"limit": 3}).json()
    cursor = first["next_cursor"]
    second = harness.post("/sessions/search", {"limit": 3, "cursor": cursor}).json()
    done = {"statuses": [{"type": "client_finished", "reasons": ["errored"]}]}
    finished = harness.post("/sessions/search", done).json()["sessions"]

    session_ids = [row["session_id"] for row in first["sessions"] + second["sessions"]]
    assert session_ids == made[::-1]
    assert "next_cursor" not in second
    assert first["sessions"][0]["checkpoints_count"] == 1
    assert first["sessions"][0]["status"] == {"type": "active"}
    assert [row["session_id"] for row in finished] == [made[0]]
    assert finished[0]["status"] == {
        "type": "client_finished",
        "reason": {"type": "errored"},
        "detail": "oops",
    }


def test_session_without_heartbeat_is_cancelled(harness: ServerHarness) -> None:
    harness.session()
    later = time.time() + 1
    harness.write(lambda db: sessions.expire_unseen(db, unseen_since=later, now=later))

    page = harness.post("/sessions/search", {"statuses": [{"type": "cancelled"}]}).json()

    assert page["sessions"][0]["status"]["type"] == "cancelled"


@pytest.mark.parametrize("project_id", ["", "a b", "a/b", "x" * 256])
def test_invalid_project_id_is_rejected(harness: ServerHarness, project_id: str) -> None:
    session_id = harness.session()

    answer = harness.send_request(
        "PUT", f"/sessions/{session_id}/project", json={"project_id": project_id}
    )

    assert answer.status_code == 422


# --- audit and usage -----------------------------------------------------------------------------
def test_checkpoint_and_project_changes_are_audited(harness: ServerHarness) -> None:
    session_id = harness.session()
    run_id = create_ready_model(harness, session_id)
    checkpoint = create_checkpoint(harness, run_id)
    harness.send_request("POST", checkpoint_url(checkpoint, "/publish"))
    harness.send_request("GET", checkpoint_url(checkpoint, "/archive"), follow_redirects=False)
    harness.send_request("DELETE", checkpoint_url(checkpoint, "/publish"))
    harness.send_request("PUT", checkpoint_url(checkpoint, "/ttl"), json={"ttl_seconds": 60})
    harness.send_request("PUT", f"/sessions/{session_id}/project", json={"project_id": "p"})
    harness.send_request("DELETE", checkpoint_url(checkpoint))

    entries = harness.send_request("GET", "/audit").json()["entries"]
    only = harness.send_request("GET", "/audit?event_type=checkpoints").json()["entries"]
    projects = harness.send_request("GET", "/audit?event_type=projects").json()["entries"]

    assert [entry["event"] for entry in entries] == [
        "api_key_created",
        "session_created",
        "checkpoint_published",
        "checkpoint_downloaded",
        "checkpoint_unpublished",
        "checkpoint_ttl_set",
        "project_assigned",
        "checkpoint_deleted",
    ]
    assert [entry["event"] for entry in only] == [
        event for event in (row["event"] for row in entries) if event.startswith("checkpoint_")
    ]
    assert only[0]["tinker_path"] == str(checkpoint.path)
    assert only[0]["model_id"] == run_id
    assert only[0]["event_details"]["actor"] == f"tml:user:{harness.tenant_id}"
    assert projects[0]["event_details"]["previous_project_id"] == "default"
    others = harness.send_request("GET", "/audit", key=OTHER_KEY).json()["entries"]
    assert [entry["event"] for entry in others] == ["api_key_created"]


def test_the_audit_log_shows_one_day(harness: ServerHarness) -> None:
    harness.session()
    today = datetime.now(UTC).date()

    shown = [
        len(
            harness.send_request("GET", f"/audit?day={today + timedelta(days=days)}").json()[
                "entries"
            ]
        )
        for days in (-1, 0, 1)
    ]

    assert shown == [0, len(["api_key_created", "session_created"]), 0]
    assert harness.send_request("GET", "/audit?day=9999-12-31").json() == {"entries": []}
    assert harness.send_request("GET", "/audit?day=0001-01-01").json() == {"entries": []}


def span(start: datetime, end: datetime) -> dict[str, str]:
    return {"starting_on": start.isoformat(), "ending_before": end.isoformat()}


def test_usage_is_reported_by_the_hour(harness: ServerHarness) -> None:
    session_id = harness.session()
    run_id = create_ready_model(harness, session_id)
    now = time.time()
    hour = datetime.fromtimestamp(now // HOUR * HOUR, UTC)
    two_hours = now - 2 * HOUR

    def count(db: Any) -> None:
        for kind, amount, at in (
            ("training", 100, two_hours),
            ("training", 50, now),
            ("prefill", 7, now),
            ("prefill_cached", 3, now),
            ("sample", 9, now),
            ("checkpoint", 1, now),
        ):
            accounting.add_usage(
                db,
                tenant_id=harness.tenant_id,
                session_id=session_id,
                run_id=run_id,
                base_model=BASE_MODEL,
                kind=kind,
                amount=amount,
                now=at,
            )

    harness.write(count)
    params = span(hour - timedelta(hours=2), hour + timedelta(hours=1))
    answer = harness.send_request("GET", "/billing/usage/events", params=params).json()

    infos = [event["event_info"] for event in answer["data"]]
    assert infos[0] == {"type": "training", "token_count": 100}
    assert sorted(infos[1:], key=str) == sorted(
        [
            {"type": "training", "token_count": 50},
            {"type": "sampling_prefill", "cached": False, "token_count": 7},
            {"type": "sampling_prefill", "cached": True, "token_count": 3},
            {"type": "sampling_sample", "token_count": 9},
            {"type": "checkpoint", "count": 1},
        ],
        key=str,
    )
    assert answer["data"][0]["session_id"] == session_id
    assert answer["data"][0]["project_id"] == "default"
    assert answer["sessions"] == {session_id: {"user_metadata": {}}}
    theirs = harness.send_request(
        "GET", "/billing/usage/events", params=params, key=OTHER_KEY
    ).json()
    assert theirs == {"data": [], "sessions": {}}


def test_storage_is_reported_in_gigabyte_hours(harness: ServerHarness) -> None:
    now = time.time()
    run_id = create_ready_model(harness, harness.session())
    hour = datetime.fromtimestamp(now // HOUR * HOUR, UTC)
    begin = (hour - timedelta(hours=2)).timestamp() + HOUR / 2
    create_checkpoint(
        harness, run_id, size_bytes=10**9, created_at=begin, expires_at=hour.timestamp()
    )

    params = span(hour - timedelta(hours=3), hour + timedelta(hours=1))
    data = harness.send_request("GET", "/billing/usage/events", params=params).json()["data"]

    # It expired on the hour, so it is not counted.
    assert data == []
    create_checkpoint(harness, run_id, "b", size_bytes=10**9, created_at=begin)
    data = harness.send_request("GET", "/billing/usage/events", params=params).json()["data"]
    amounts = [event["event_info"]["gigabyte_hours"] for event in data]
    assert amounts[:2] == pytest.approx([0.5, 1.0])
    assert amounts[2] == pytest.approx(now / HOUR % 1, abs=0.1)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"starting_on": "2026-01-01T00:00:00Z"},
        {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-01-01T00:00:00Z"},
        {"starting_on": "2026-01-02T00:00:00Z", "ending_before": "2026-01-01T00:00:00Z"},
        {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-01-15T01:00:00Z"},
        {"starting_on": "2026-01-01T00:30:00Z", "ending_before": "2026-01-02T00:00:00Z"},
        {"starting_on": "2026-01-01T00:00:00", "ending_before": "2026-01-02T00:00:00"},
        {"starting_on": "yesterday", "ending_before": "2026-01-02T00:00:00Z"},
    ],
)
def test_invalid_usage_ranges_are_rejected(harness: ServerHarness, params: dict[str, str]) -> None:
    assert harness.send_request("GET", "/billing/usage/events", params=params).status_code == 422


def test_usage_range_of_fourteen_days(harness: ServerHarness) -> None:
    params = {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-01-15T00:00:00Z"}

    assert harness.send_request("GET", "/billing/usage/events", params=params).status_code == 200


def test_current_storage_is_reported_by_project(harness: ServerHarness) -> None:
    session_id = harness.session()
    run_id = create_ready_model(harness, session_id)
    create_checkpoint(harness, run_id, "a", size_bytes=10)
    create_checkpoint(harness, run_id, "b", size_bytes=20)
    harness.send_request("PUT", f"/sessions/{session_id}/project", json={"project_id": "blue"})
    create_checkpoint(harness, create_ready_model(harness, harness.session()), size_bytes=5)
    path = "/billing/usage/checkpoints/current"

    items = harness.send_request("GET", path).json()["data"]
    blue = harness.send_request("GET", f"{path}?project_id=blue").json()["data"]

    assert [(row["project_id"], row["checkpoint_count"], row["size_bytes"]) for row in items] == [
        ("blue", 2, 30),
        ("default", 1, 5),
    ]
    assert blue == items[:1]
    assert blue[0]["size_gigabytes"] == pytest.approx(30e-9)


def test_audit_log_page_limit(harness: ServerHarness) -> None:
    assert harness.send_request("GET", "/audit?event_type=gossip").status_code == 422
    assert harness.send_request("GET", "/audit?day=today").status_code == 422
