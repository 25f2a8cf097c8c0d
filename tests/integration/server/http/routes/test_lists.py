from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa

from tests.support.server_harness import BASE_MODEL, OTHER_KEY, House
from tests.support.resources import create_model, ready_model, saved, share, url_of
from tinkex.ids import PATH_SHAPE
from tinkex.store import accounting, checkpoints, runs, schema, sessions
from tinkex.store.records import RunState

HOUR = 3600


# --- runs --------------------------------------------------------------------------------------
def test_runs_are_listed_newest_first_in_pages(house: House) -> None:
    session_id = house.session()
    made = [ready_model(house, session_id, number) for number in range(5)]

    page = house.ask("GET", "/training_runs?limit=2&offset=1").json()

    assert [run["training_run_id"] for run in page["training_runs"]] == [made[3], made[2]]
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 5}
    everything = house.ask("GET", "/training_runs").json()
    assert everything["cursor"] == {"offset": 0, "limit": 20, "total_count": 5}


def test_a_run_shows_its_newest_checkpoints_and_what_was_attached(house: House) -> None:
    create_model(house, session_id := house.session(), user_metadata={"n": 1, "s": "x"})
    run_id = f"{session_id}:train:0"
    saved(house, run_id, "old")
    newest = saved(house, run_id, "new")
    sampler = saved(house, run_id, "s", "sampler_weights")

    run = house.ask("GET", f"/training_runs/{run_id}").json()

    assert run["last_checkpoint"]["tinker_path"] == str(newest.path)
    assert run["last_sampler_checkpoint"]["tinker_path"] == str(sampler.path)
    assert run["user_metadata"] == {"n": "1", "s": "x"}
    assert (run["is_lora"], run["lora_rank"], run["corrupted"]) == (True, 4, False)
    assert run["model_owner"] == f"tml:user:{house.tenant_id}"
    assert house.ask("GET", "/training_runs").json()["training_runs"] == [run]


def test_a_run_that_lost_its_state_is_marked(house: House) -> None:
    run_id = ready_model(house, house.session())
    house.write(lambda db: runs.set_state(db, run_id, RunState.CORRUPTED))

    assert house.ask("GET", f"/training_runs/{run_id}").json()["corrupted"] is True


def found_by(house: House, text: str) -> list[str]:
    answer = house.ask("GET", f"/training_runs?search={quote(text)}")
    assert answer.status_code == 200, answer.text
    page = answer.json()
    return [run["training_run_id"] for run in page["training_runs"]]


def test_runs_are_found_by_the_beginning_of_their_id_and_by_their_name(house: House) -> None:
    create_model(house, first := house.session(), user_metadata={"name": "Blue whale"})
    create_model(house, second := house.session())
    named = sa.update(schema.sessions).where(schema.sessions.c.id == second)
    house.write(lambda db: db.execute(named.values(search_name="whale song")))
    create_model(house, third := house.session(), user_metadata={"name": "100% \u00c9t\u00e9"})

    assert found_by(house, first[:12]) == [f"{first}:train:0"]
    assert found_by(house, "WHALE") == [f"{second}:train:0", f"{first}:train:0"]
    assert found_by(house, "100%") == found_by(house, "\u00c9t\u00e9") == [f"{third}:train:0"]
    assert found_by(house, "_") == found_by(house, "nothing") == []


def test_a_run_is_renamed(house: House) -> None:
    create_model(house, session_id := house.session(), user_metadata={"team": "red"})
    path = f"/training_runs/{session_id}:train:0"

    for name, shown in (("  first try ", "first try"), ("\u00fcber", "\u00fcber"), (None, None)):
        assert house.ask("PUT", f"{path}/name", json={"name": name}).status_code == 200
        run = house.ask("GET", path).json()
        assert run.get("name") == shown
        assert run["user_metadata"]["team"] == "red"
    for name in ("x" * 121, "two\nlines"):
        refused = house.ask("PUT", f"{path}/name", json={"name": name})
        assert (refused.status_code, "printable" in refused.text) == (422, True)


def test_runs_are_listed_by_project(house: House) -> None:
    session_id = house.session()
    run_id = ready_model(house, session_id)
    ready_model(house, house.session())

    assigned = house.ask("PUT", f"/sessions/{session_id}/project", json={"project_id": "blue"})

    assert assigned.status_code == 200
    listed = house.ask("GET", "/training_runs?project_id=blue").json()
    assert [run["training_run_id"] for run in listed["training_runs"]] == [run_id]
    assert listed["cursor"]["total_count"] == 1


def test_of_others_runs_only_what_is_published_is_seen_and_only_when_asked_for(
    house: House,
) -> None:
    create_model(house, session_id := house.session(), user_metadata={"secret": "x"})
    run_id = f"{session_id}:train:0"
    shown = saved(house, run_id, "shown")
    saved(house, run_id, "private")
    theirs = {"key": OTHER_KEY}
    scope = "?access_scope=accessible"
    assert house.ask("GET", f"/training_runs/{run_id}{scope}", **theirs).status_code == 404

    share(house, shown)

    run = house.ask("GET", f"/training_runs/{run_id}{scope}", **theirs).json()
    assert run["last_checkpoint"]["tinker_path"] == str(shown.path)
    assert "user_metadata" not in run
    assert house.ask("GET", f"/training_runs{scope}", **theirs).json()["training_runs"] == [run]
    assert house.ask("GET", f"/training_runs/{run_id}", **theirs).status_code == 404
    assert house.ask("GET", "/training_runs", **theirs).json()["training_runs"] == []


# --- checkpoints ---------------------------------------------------------------------------------
def test_the_checkpoints_of_a_run_are_listed_newest_first(house: House) -> None:
    run_id = ready_model(house, house.session())
    first = saved(house, run_id, "first", user_metadata={"k": "v"})
    second = saved(house, run_id, "second", "external_weights", expires_at=time.time() + 60)
    saved(house, run_id, ".ephemeral", "sampler_weights", is_ephemeral=True)

    listed = house.ask("GET", f"/training_runs/{run_id}/checkpoints").json()["checkpoints"]

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
    }


def test_the_first_sdks_list_the_checkpoints_of_a_model(house: House) -> None:
    """Up to 0.3.0 the path says `models`."""
    run_id = ready_model(house, house.session())
    saved(house, run_id, "first")

    old, new = (
        house.ask("GET", f"/{prefix}/{run_id}/checkpoints").json()
        for prefix in ("models", "training_runs")
    )

    assert old == new
    assert [row["checkpoint_id"] for row in old["checkpoints"]] == ["weights/first"]


def test_all_checkpoints_are_listed_in_pages(house: House) -> None:
    run_id = ready_model(house, house.session())
    made = [str(saved(house, run_id, f"c{number}").path) for number in range(4)]

    page = house.ask("GET", "/checkpoints?limit=3&offset=1").json()

    assert [row["tinker_path"] for row in page["checkpoints"]] == [made[2], made[1], made[0]]
    assert page["cursor"] == {"offset": 1, "limit": 3, "total_count": 4}


@pytest.mark.parametrize("version", ["0.6.0", "0.25.0", "0.27.0"])
def test_old_sdks_see_no_external_checkpoints(house: House, version: str) -> None:
    run_id = ready_model(house, house.session())
    names = ("weights", "external_weights", "sampler_weights", "external_weights", "weights")
    for number, segment in enumerate(names):
        saved(house, run_id, f"n{number}", segment)
    old = {"headers": {"X-Stainless-Package-Version": version}}

    ids = [
        [each["checkpoint_id"] for each in page["checkpoints"]]
        for page in (
            house.ask("GET", "/checkpoints?limit=2", **old).json(),
            house.ask("GET", "/checkpoints?limit=2&offset=2", **old).json(),
            house.ask("GET", f"/training_runs/{run_id}/checkpoints", **old).json(),
        )
    ]

    assert ids[0] == ["weights/n4", "sampler_weights/n2"]
    assert ids[1] == ["weights/n0"]
    assert ids[2] == ids[0] + ids[1]
    cursor = house.ask("GET", "/checkpoints?limit=2", **old).json()["cursor"]
    assert cursor == {"offset": 0, "limit": 2, "total_count": 3}


def test_the_sdk_of_the_session_decides_if_no_header_does(house: House) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.25.0"}
    session_id = house.post("/create_session", body).json()["session_id"]
    run_id = ready_model(house, session_id)
    saved(house, run_id, "x", "external_weights")
    url = f"/training_runs/{run_id}/checkpoints"
    new = {"headers": {"User-Agent": "AsyncTinker/Python 0.28.0"}}

    assert house.ask("GET", url).json()["checkpoints"] == []
    assert len(house.ask("GET", url, **new).json()["checkpoints"]) == 1
    assert house.ask("GET", "/checkpoints").json()["cursor"]["total_count"] == 1


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "offset=-1", "offset=1e3", "limit=5&limit=6"]
)
@pytest.mark.parametrize("path", ["/training_runs", "/checkpoints", "/sessions"])
def test_pages_have_bounds(house: House, path: str, query: str) -> None:
    assert house.ask("GET", f"{path}?{query}").status_code == 422


@pytest.mark.parametrize("given", ["0001", "run/weights/0001", "weights", "tinker://r/weights/1"])
def test_a_bare_checkpoint_id_gets_the_shape_of_one(house: House, given: str) -> None:
    run_id = ready_model(house, house.session())
    answer = house.ask("DELETE", f"/training_runs/{run_id}/checkpoints/{given}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error.startswith(f"there is no checkpoint {given!r}; a checkpoint id is <weights|")
    assert error.endswith(f"and a whole path {PATH_SHAPE}")


def test_a_deleted_checkpoint_is_gone_at_once(house: House) -> None:
    checkpoint = saved(house, ready_model(house, house.session()))

    first = house.ask("DELETE", url_of(checkpoint))
    second = house.ask("DELETE", url_of(checkpoint))

    assert (first.status_code, second.status_code) == (200, 404)
    assert house.ask("GET", "/checkpoints").json()["checkpoints"] == []


def test_publishing_what_is_public_is_a_conflict_that_nobody_should_retry(house: House) -> None:
    checkpoint = saved(house, ready_model(house, house.session()))
    url = url_of(checkpoint, "/publish")

    answers = [house.ask(method, url) for method in ("POST", "POST", "DELETE", "DELETE")]

    assert [answer.status_code for answer in answers] == [200, 409, 200, 409]
    assert answers[1].headers["x-should-retry"] == "false"
    assert answers[1].json()["error"] == f"{checkpoint.path} is public already"


def test_a_lifetime_can_be_set_and_removed(house: House) -> None:
    checkpoint = saved(house, ready_model(house, house.session()))
    url = url_of(checkpoint, "/ttl")

    def expiry() -> Any:
        return house.read(lambda db: checkpoints.find_by_id(db, checkpoint.id, 0)).expires_at

    assert house.ask("PUT", url, json={"ttl_seconds": 60}).status_code == 200
    assert time.time() < expiry() <= time.time() + 60
    assert house.ask("PUT", url, json={"ttl_seconds": None}).status_code == 200
    assert expiry() is None
    for wrong in (0, -1, 10 * 366 * 24 * HOUR, "x"):
        assert house.ask("PUT", url, json={"ttl_seconds": wrong}).status_code == 422


# --- sessions ------------------------------------------------------------------------------------
def test_sessions_are_listed_newest_first_in_pages(house: House) -> None:
    made = [house.session() for _ in range(3)]
    house.session(OTHER_KEY)

    listed = house.ask("GET", "/sessions?limit=2&access_scope=accessible").json()

    assert listed == {"sessions": [made[2], made[1]]}
    assert house.ask("GET", "/sessions?offset=2").json() == {"sessions": [made[0]]}


def test_a_session_shows_what_belongs_to_it(house: House) -> None:
    body = {
        "tags": [],
        "user_metadata": {"n": 1},
        "sdk_version": "1",
        "display_name": "Night run",
    }
    session_id = house.post("/create_session", body).json()["session_id"]
    run_id = ready_model(house, session_id)
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler_id = house.post("/create_sampling_session", sampler).json()["sampling_session_id"]

    assert house.ask("GET", f"/sessions/{session_id}").json() == {
        "training_run_ids": [run_id],
        "sampler_ids": [sampler_id],
        "user_metadata": {"n": "1"},
        "display_name": "Night run",
    }


def test_the_search_finds_sessions_by_state_and_goes_on_where_it_stopped(house: House) -> None:
    made = [house.session() for _ in range(5)]
    house.write(lambda db: sessions.finish(db, made[0], "errored", "oops", time.time()))
    house.write(lambda db: sessions.expire_unseen(db, unseen_since=0, now=time.time()))
    saved(house, ready_model(house, made[4]))

    first = house.post("/sessions/search", {"limit": 3}).json()
    cursor = first["next_cursor"]
    second = house.post("/sessions/search", {"limit": 3, "cursor": cursor}).json()
    done = {"statuses": [{"type": "client_finished", "reasons": ["errored"]}]}
    finished = house.post("/sessions/search", done).json()["sessions"]

    found = [row["session_id"] for row in first["sessions"] + second["sessions"]]
    assert found == made[::-1]
    assert "next_cursor" not in second
    assert first["sessions"][0]["checkpoints_count"] == 1
    assert first["sessions"][0]["status"] == {"type": "active"}
    assert [row["session_id"] for row in finished] == [made[0]]
    assert finished[0]["status"] == {
        "type": "client_finished",
        "reason": {"type": "errored"},
        "detail": "oops",
    }


def test_a_session_that_is_not_heard_of_shows_as_cancelled(house: House) -> None:
    house.session()
    later = time.time() + 1
    house.write(lambda db: sessions.expire_unseen(db, unseen_since=later, now=later))

    found = house.post("/sessions/search", {"statuses": [{"type": "cancelled"}]}).json()

    assert found["sessions"][0]["status"]["type"] == "cancelled"


@pytest.mark.parametrize("project_id", ["", "a b", "a/b", "x" * 256])
def test_a_project_that_could_not_be_asked_for_is_refused(house: House, project_id: str) -> None:
    session_id = house.session()

    answer = house.ask("PUT", f"/sessions/{session_id}/project", json={"project_id": project_id})

    assert answer.status_code == 422


# --- audit and usage -----------------------------------------------------------------------------
def test_what_is_done_to_checkpoints_and_projects_is_written_down(house: House) -> None:
    session_id = house.session()
    run_id = ready_model(house, session_id)
    checkpoint = saved(house, run_id)
    house.ask("POST", url_of(checkpoint, "/publish"))
    house.ask("GET", url_of(checkpoint, "/archive"), follow_redirects=False)
    house.ask("DELETE", url_of(checkpoint, "/publish"))
    house.ask("PUT", url_of(checkpoint, "/ttl"), json={"ttl_seconds": 60})
    house.ask("PUT", f"/sessions/{session_id}/project", json={"project_id": "p"})
    house.ask("DELETE", url_of(checkpoint))

    entries = house.ask("GET", "/audit").json()["entries"]
    only = house.ask("GET", "/audit?event_type=checkpoints").json()["entries"]
    projects = house.ask("GET", "/audit?event_type=projects").json()["entries"]

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
    assert only[0]["event_details"]["actor"] == f"tml:user:{house.tenant_id}"
    assert projects[0]["event_details"]["previous_project_id"] == "default"
    others = house.ask("GET", "/audit", key=OTHER_KEY).json()["entries"]
    assert [entry["event"] for entry in others] == ["api_key_created"]


def test_the_audit_log_shows_one_day(house: House) -> None:
    house.session()
    today = datetime.now(UTC).date()

    shown = [
        len(house.ask("GET", f"/audit?day={today + timedelta(days=days)}").json()["entries"])
        for days in (-1, 0, 1)
    ]

    assert shown == [0, len(["api_key_created", "session_created"]), 0]
    assert house.ask("GET", "/audit?day=9999-12-31").json() == {"entries": []}
    assert house.ask("GET", "/audit?day=0001-01-01").json() == {"entries": []}


def span(start: datetime, end: datetime) -> dict[str, str]:
    return {"starting_on": start.isoformat(), "ending_before": end.isoformat()}


def test_usage_is_reported_by_the_hour(house: House) -> None:
    session_id = house.session()
    run_id = ready_model(house, session_id)
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
                tenant_id=house.tenant_id,
                session_id=session_id,
                run_id=run_id,
                base_model=BASE_MODEL,
                kind=kind,
                amount=amount,
                now=at,
            )

    house.write(count)
    params = span(hour - timedelta(hours=2), hour + timedelta(hours=1))
    answer = house.ask("GET", "/billing/usage/events", params=params).json()

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
    theirs = house.ask("GET", "/billing/usage/events", params=params, key=OTHER_KEY).json()
    assert theirs == {"data": [], "sessions": {}}


def test_storage_is_reported_in_gigabyte_hours(house: House) -> None:
    now = time.time()
    run_id = ready_model(house, house.session())
    hour = datetime.fromtimestamp(now // HOUR * HOUR, UTC)
    begin = (hour - timedelta(hours=2)).timestamp() + HOUR / 2
    saved(house, run_id, size_bytes=10**9, created_at=begin, expires_at=hour.timestamp())

    params = span(hour - timedelta(hours=3), hour + timedelta(hours=1))
    data = house.ask("GET", "/billing/usage/events", params=params).json()["data"]

    # It expired on the hour, so it is not there any more and not counted.
    assert data == []
    saved(house, run_id, "b", size_bytes=10**9, created_at=begin)
    data = house.ask("GET", "/billing/usage/events", params=params).json()["data"]
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
def test_spans_that_are_no_full_hours_or_too_long_are_refused(
    house: House, params: dict[str, str]
) -> None:
    assert house.ask("GET", "/billing/usage/events", params=params).status_code == 422


def test_fourteen_days_are_not_too_long(house: House) -> None:
    params = {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-01-15T00:00:00Z"}

    assert house.ask("GET", "/billing/usage/events", params=params).status_code == 200


def test_current_storage_is_reported_by_project(house: House) -> None:
    session_id = house.session()
    run_id = ready_model(house, session_id)
    saved(house, run_id, "a", size_bytes=10)
    saved(house, run_id, "b", size_bytes=20)
    house.ask("PUT", f"/sessions/{session_id}/project", json={"project_id": "blue"})
    saved(house, ready_model(house, house.session()), size_bytes=5)
    path = "/billing/usage/checkpoints/current"

    items = house.ask("GET", path).json()["data"]
    blue = house.ask("GET", f"{path}?project_id=blue").json()["data"]

    assert [(row["project_id"], row["checkpoint_count"], row["size_bytes"]) for row in items] == [
        ("blue", 2, 30),
        ("default", 1, 5),
    ]
    assert blue == items[:1]
    assert blue[0]["size_gigabytes"] == pytest.approx(30e-9)


def test_the_audit_log_has_bounds(house: House) -> None:
    assert house.ask("GET", "/audit?event_type=gossip").status_code == 422
    assert house.ask("GET", "/audit?day=today").status_code == 422
