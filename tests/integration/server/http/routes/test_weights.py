from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.server_harness import BASE_MODEL, KEY, OTHER_KEY, House
from tests.support.resources import FILES, ready_model, saved, share
from tinkex.checkpoint.manifest import check_manifest
from tinkex.errors import StoreUnavailable
from tinkex.ids import parse_tinker_path
from tinkex.jobs.job_types import LoadPayload
from tinkex.server.http.store_access import write
from tinkex.store import accounting, checkpoints, jobs, runs, sessions
from tinkex.store.records import RunState
from tinkex.wire.codec import decode_json

YEARS = 10 * 365 * 24 * 3600


def job_of(house: House, request_id: str) -> Any:
    return house.read(lambda db: jobs.find(db, request_id))


def load_payload(house: House, request_id: str) -> LoadPayload:
    raw = house.read(lambda db: jobs.get_payloads(db, [request_id]))[request_id]
    return decode_json(raw, LoadPayload)


def events(house: House, tenant_id: str | None = None) -> list[str]:
    found = house.read(
        lambda db: accounting.list_audit(
            db, tenant_id or house.tenant_id, since=0, until=time.time() + 60, events=None
        )
    )
    return [entry.event for entry in reversed(found)]


# --- saving ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "fields", "kind"),
    [
        ("/save_weights", {"path": "a"}, "save_weights"),
        ("/save_weights", {}, "save_weights"),
        ("/save_weights_for_sampler", {"path": "a"}, "save_weights_for_sampler"),
        ("/save_weights_for_sampler", {"sampling_session_seq_id": 0}, "save_weights_for_sampler"),
        ("/save_weights_external", {"path": "a", "ttl_seconds": YEARS}, "save_weights_external"),
    ],
)
def test_saves_are_promised_in_their_place(
    house: House, path: str, fields: dict[str, Any], kind: str
) -> None:
    run_id = ready_model(house, house.session())

    first, second = (
        house.post(path, {"model_id": run_id, "seq_id": 1, **fields}).json() for _ in range(2)
    )

    assert first == second
    job = job_of(house, first["request_id"])
    assert (job.kind, job.position, job.run_id) == (kind, 1, run_id)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/save_weights", {"path": "../x"}),
        ("/save_weights", {"path": "a/b"}),
        ("/save_weights", {"path": ".hidden"}),
        ("/save_weights", {"path": ""}),
        ("/save_weights", {"path": "a", "ttl_seconds": 0}),
        ("/save_weights", {"path": "a", "ttl_seconds": YEARS + 1}),
        ("/save_weights", {"path": "a", "user_metadata": {"k": "v" * 70_000}}),
        ("/save_weights_for_sampler", {}),
        ("/save_weights_for_sampler", {"sampling_session_seq_id": -1}),
        ("/save_weights_for_sampler", {"path": "a b"}),
        ("/save_weights_external", {"path": "a", "ttl_seconds": -5}),
    ],
)
def test_bad_names_and_lifetimes_are_refused_and_nothing_waits(
    house: House, path: str, fields: dict[str, Any]
) -> None:
    run_id = ready_model(house, house.session())
    before = house.read(jobs.get_load).num_jobs

    answer = house.post(path, {"model_id": run_id, "seq_id": 1, **fields})

    assert answer.status_code == 422
    assert house.read(jobs.get_load).num_jobs == before


# --- loading -----------------------------------------------------------------------------------
def load(house: House, key: str = KEY, **fields: Any) -> Any:
    return house.post("/load_weights", {"optimizer": True, **fields}, key=key)


def test_weights_are_found_when_the_promise_is_made(house: House) -> None:
    run_id = ready_model(house, house.session())
    checkpoint = saved(house, run_id)

    answer = load(house, model_id=run_id, seq_id=1, path=str(checkpoint.path))

    payload = load_payload(house, answer.json()["request_id"])
    assert payload.checkpoint_id == checkpoint.id
    assert payload.with_optimizer is True
    assert events(house)[-1] == "checkpoint_loaded"


def test_a_load_that_does_not_mention_the_optimizer_restores_it(house: House) -> None:
    """SDKs before 0.6 have one kind of load, of the full state."""
    run_id = ready_model(house, house.session())
    path = str(saved(house, run_id).path)

    answer = house.post("/load_weights", {"model_id": run_id, "seq_id": 1, "path": path})

    assert load_payload(house, answer.json()["request_id"]).with_optimizer is True


def test_a_repeated_load_gets_its_promise_although_the_weights_are_gone(house: House) -> None:
    run_id = ready_model(house, house.session())
    checkpoint = saved(house, run_id)
    request = {"model_id": run_id, "seq_id": 1, "path": str(checkpoint.path)}
    first = load(house, **request)
    house.write(lambda db: checkpoints.delete(db, checkpoint.id, time.time()))

    assert load(house, **request).json() == first.json()
    assert load(house, **request | {"seq_id": 2}).status_code == 404


def test_a_model_can_be_made_by_loading(house: House) -> None:
    session_id = house.session()
    checkpoint = saved(house, ready_model(house, session_id))
    request = {"session_id": session_id, "model_seq_id": 5, "path": str(checkpoint.path)}

    first, second = (load(house, **request).json() for _ in range(2))

    assert first == second
    assert first["model_id"] == f"{session_id}:train:5"
    run = house.read(lambda db: runs.find(db, first["model_id"]))
    assert (run.state, run.base_model) == (RunState.CREATING, BASE_MODEL)
    assert run.spec == checkpoint.spec
    assert job_of(house, first["request_id"]).position == 0


def test_without_its_state_the_optimizer_is_the_one_that_is_asked_for(house: House) -> None:
    session_id = house.session()
    path = str(saved(house, ready_model(house, session_id)).path)
    request = {"session_id": session_id, "path": path, "optimizer": False}

    default = load(house, **request, model_seq_id=1).json()["model_id"]
    chosen = {"type": "dimuon", "version": 1}
    named = load(house, **request, model_seq_id=2, optimizer_config=chosen).json()["model_id"]

    assert house.read(lambda db: runs.find(db, default)).spec["optimizer"] == {"type": "adamw"}
    assert house.read(lambda db: runs.find(db, named)).spec["optimizer"] == chosen


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"path": "tinker://x/weights/y"}, 404, "there is no checkpoint 'tinker://x/weights/y'"),
        ({"path": "nowhere"}, 422, "Invalid tinker path"),
        ({"model_seq_id": None}, 422, "needs model_id, or session_id and model_seq_id"),
        ({"session_id": None}, 422, "needs model_id, or session_id and model_seq_id"),
        ({"model_seq_id": -1}, 422, "model_seq_id"),
        ({"base_model": "other"}, 400, "'other' cannot be trained"),
        ({"model_seq_id": 0}, 400, "was used for create_model before"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_a_sentence(
    house: House, fields: dict[str, Any], status: int, words: str
) -> None:
    session_id = house.session()
    path = str(saved(house, ready_model(house, session_id)).path)

    answer = load(house, **{"session_id": session_id, "model_seq_id": 1, "path": path} | fields)

    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_weights_to_sample_from_cannot_be_trained_on(house: House) -> None:
    run_id = ready_model(house, house.session())
    path = str(saved(house, run_id, segment="sampler_weights").path)

    answer = load(house, model_id=run_id, seq_id=1, path=path)

    assert answer.status_code == 400
    assert "is no training checkpoint" in answer.json()["error"]


# --- reading what others own ---------------------------------------------------------------------
def test_published_weights_can_be_loaded_by_everybody_and_private_ones_by_a_lent_key(
    house: House,
) -> None:
    checkpoint = saved(house, ready_model(house, house.session()))
    theirs = ready_model(house, house.session(OTHER_KEY), key=OTHER_KEY)
    request = {"model_id": theirs, "path": str(checkpoint.path)}

    private = load(house, key=OTHER_KEY, seq_id=1, **request)
    wrong = load(house, key=OTHER_KEY, seq_id=2, weights_access_token="tml-no", **request)
    lent = load(house, key=OTHER_KEY, seq_id=3, weights_access_token=KEY, **request)
    share(house, checkpoint)
    public = load(house, key=OTHER_KEY, seq_id=4, **request)

    statuses = [answer.status_code for answer in (private, wrong, lent, public)]
    assert statuses == [404, 404, 200, 200]
    assert private.json() == wrong.json()


def test_the_info_of_weights_says_what_is_needed_to_load_them(house: House) -> None:
    checkpoint = saved(house, ready_model(house, house.session()))
    body = {"tinker_path": str(checkpoint.path)}

    info = house.post("/weights_info", body)

    assert info.json() == {
        "base_model": BASE_MODEL,
        "is_lora": True,
        "lora_rank": 4,
        "train_unembed": True,
        "train_mlp": False,
        "train_attn": True,
        "optimizer_config": {"type": "dimuon", "version": 1},
    }
    assert house.post("/weights_info", body, key=OTHER_KEY).status_code == 404
    lent = {"X-Tinker-Weights-Access-Token": KEY}
    assert house.post("/weights_info", body, key=OTHER_KEY, headers=lent).status_code == 200


# --- copies --------------------------------------------------------------------------------------
def copy(house: House, key: str = KEY, repeat: str | None = None, **fields: Any) -> Any:
    headers = {"X-Idempotency-Key": repeat} if repeat else {}
    return house.post("/copy_weights", fields, key=key, headers=headers)


def test_a_copy_has_the_same_files_and_a_life_of_its_own(house: House) -> None:
    session_id = house.session()
    source = saved(house, ready_model(house, session_id), user_metadata={"k": "v"})

    answer = copy(
        house,
        source_path=str(source.path),
        session_id=session_id,
        model_seq_id=3,
        ttl_seconds=60,
    )

    path = parse_tinker_path(answer.json()["tinker_path"])
    assert (path.run_id, path.checkpoint_id) == (f"{session_id}:train:3", "weights/first")
    found = house.read(lambda db: checkpoints.find(db, path, time.time()))
    assert (found.size_bytes, found.user_metadata) == (source.size_bytes, {"k": "v"})
    assert found.expires_at is not None and not found.is_public
    directory = house.services.home.checkpoint_directory(found.id)
    assert set(check_manifest(directory).files) == set(FILES)
    house.write(lambda db: checkpoints.delete(db, source.id, time.time()))
    assert house.read(lambda db: checkpoints.find(db, path, time.time())) is not None
    assert events(house)[-1] == "checkpoint_copied"
    run = house.read(lambda db: runs.find(db, path.run_id))
    assert run.state == RunState.UNLOADED


def test_a_copy_takes_no_room_where_files_can_be_shared(house: House) -> None:
    source = saved(house, ready_model(house, house.session()))

    path = parse_tinker_path(copy(house, source_path=str(source.path)).json()["tinker_path"])

    found = house.read(lambda db: checkpoints.find(db, path, time.time()))
    home = house.services.home
    for name in FILES:
        assert (home.checkpoint_directory(source.id) / name).samefile(
            home.checkpoint_directory(found.id) / name
        )


def test_a_repeated_copy_is_made_once(house: House) -> None:
    source = saved(house, ready_model(house, house.session()))
    request = {"source_path": str(source.path), "destination_project_id": "research"}

    first, second = (copy(house, repeat="one", **request).json() for _ in range(2))
    third = copy(house, repeat="two", **request).json()

    assert first == second != third
    assert len(list(house.services.home.checkpoints.iterdir())) == 3
    path = parse_tinker_path(first["tinker_path"])
    found = house.read(lambda db: checkpoints.find(db, path, time.time()))
    assert (found.project_id, found.tenant_id) == ("research", house.tenant_id)
    listed = house.ask("GET", f"/training_runs/{path.run_id}/checkpoints").json()["checkpoints"]
    assert [row["tinker_path"] for row in listed] == [str(path)]


def test_a_copy_of_others_weights_needs_them_published_or_lent(house: House) -> None:
    source = saved(house, ready_model(house, house.session()))
    request = {"source_path": str(source.path)}

    private = copy(house, key=OTHER_KEY, **request)
    lent = copy(house, key=OTHER_KEY, weights_access_token=KEY, **request)
    share(house, source)
    public = copy(house, key=OTHER_KEY, **request)

    assert [answer.status_code for answer in (private, lent, public)] == [404, 200, 200]
    path = parse_tinker_path(public.json()["tinker_path"])
    found = house.read(lambda db: checkpoints.find(db, path, time.time()))
    assert (found.tenant_id, found.is_public) == (house.other_id, False)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"source_path": "tinker://x/weights/y"}, 404),
        ({"source_path": "x"}, 422),
        ({"ttl_seconds": 0}, 422),
        ({"session_id": "s"}, 422),
        ({"session_id": "s", "model_seq_id": 0}, 404),
        ({"destination_project_id": "a b"}, 422),
        ({"destination_project_id": "x" * 256}, 422),
    ],
)
def test_what_cannot_be_copied_leaves_nothing_behind(
    house: House, fields: dict[str, Any], status: int
) -> None:
    source = saved(house, ready_model(house, house.session()))

    answer = copy(house, **{"source_path": str(source.path)} | fields)

    assert answer.status_code == status
    left = [path.name for path in house.services.home.checkpoints.iterdir()]
    assert left == [source.id]


def test_a_copy_whose_place_is_taken_leaves_nothing_behind(house: House) -> None:
    session_id = house.session()
    source = saved(house, ready_model(house, session_id))

    answer = copy(house, source_path=str(source.path), session_id=session_id, model_seq_id=0)

    assert answer.status_code == 400
    assert [path.name for path in house.services.home.checkpoints.iterdir()] == [source.id]


def test_a_copy_whose_answer_was_lost_keeps_its_files(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(house, ready_model(house, house.session()))

    async def write_and_fail(*args: Any) -> Any:
        await write(*args)
        raise StoreUnavailable("the connection was lost after the commit")

    monkeypatch.setattr("tinkex.server.http.routes.weights.write", write_and_fail)

    assert copy(house, source_path=str(source.path)).status_code >= 500
    known = house.read(checkpoints.list_ids)
    assert len(known) == 2
    assert {path.name for path in house.services.home.checkpoints.iterdir()} == known


def test_a_copy_of_files_that_are_damaged_leaves_nothing_behind(house: House) -> None:
    source = saved(house, ready_model(house, house.session()))
    (house.services.home.checkpoint_directory(source.id) / "adapter_config.json").unlink()

    answer = copy(house, source_path=str(source.path))

    assert answer.status_code == 500
    assert f"checkpoint {source.path} is damaged" in answer.json()["error"]
    assert [path.name for path in house.services.home.checkpoints.iterdir()] == [source.id]


def test_a_copy_that_was_made_is_told_again_although_its_session_is_over(house: House) -> None:
    session_id = house.session()
    source = saved(house, ready_model(house, session_id))
    request = {"source_path": str(source.path), "session_id": session_id, "model_seq_id": 1}
    first = copy(house, repeat="one", **request)
    house.write(lambda db: sessions.finish(db, session_id, "success", None, time.time()))
    house.write(lambda db: checkpoints.delete(db, source.id, time.time()))

    assert copy(house, repeat="one", **request).json() == first.json()
    assert copy(house, repeat="two", **request).status_code == 400
