from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.resources import FILES, create_checkpoint, create_ready_model, publish_checkpoint
from tests.support.server_harness import BASE_MODEL, KEY, OTHER_KEY, ServerHarness
from tinkex.checkpoint.manifest import check_manifest
from tinkex.errors import StoreUnavailable
from tinkex.ids import parse_tinker_path
from tinkex.jobs.job_types import LoadPayload
from tinkex.server.http.store_access import write
from tinkex.store import accounting, checkpoints, jobs, runs, sessions
from tinkex.store.records import RunState
from tinkex.wire.codec import decode_json

YEARS = 10 * 365 * 24 * 3600


def job_of(harness: ServerHarness, request_id: str) -> Any:
    return harness.read(lambda db: jobs.find(db, request_id))


def load_payload(harness: ServerHarness, request_id: str) -> LoadPayload:
    raw = harness.read(lambda db: jobs.get_payloads(db, [request_id]))[request_id]
    return decode_json(raw, LoadPayload)


def events(harness: ServerHarness, tenant_id: str | None = None) -> list[str]:
    entries = harness.read(
        lambda db: accounting.list_audit(
            db, tenant_id or harness.tenant_id, since=0, until=time.time() + 60, events=None
        )
    )
    return [entry.event for entry in reversed(entries)]


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
def test_saves_are_queued_at_their_seq_id(
    harness: ServerHarness, path: str, fields: dict[str, Any], kind: str
) -> None:
    run_id = create_ready_model(harness, harness.session())

    first, second = (
        harness.post(path, {"model_id": run_id, "seq_id": 1, **fields}).json() for _ in range(2)
    )

    assert first == second
    job = job_of(harness, first["request_id"])
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
def test_invalid_name_or_ttl_is_rejected_without_job(
    harness: ServerHarness, path: str, fields: dict[str, Any]
) -> None:
    run_id = create_ready_model(harness, harness.session())
    before = harness.read(jobs.get_load).num_jobs

    answer = harness.post(path, {"model_id": run_id, "seq_id": 1, **fields})

    assert answer.status_code == 422
    assert harness.read(jobs.get_load).num_jobs == before


# --- loading -----------------------------------------------------------------------------------
def load(harness: ServerHarness, key: str = KEY, **fields: Any) -> Any:
    return harness.post("/load_weights", {"optimizer": True, **fields}, key=key)


def test_load_resolves_checkpoint_at_submission(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    checkpoint = create_checkpoint(harness, run_id)

    answer = load(harness, model_id=run_id, seq_id=1, path=str(checkpoint.path))

    payload = load_payload(harness, answer.json()["request_id"])
    assert payload.checkpoint_id == checkpoint.id
    assert payload.with_optimizer is True
    assert events(harness)[-1] == "checkpoint_loaded"


def test_load_restores_optimizer_by_default(harness: ServerHarness) -> None:
    """SDKs before 0.6 have one kind of load, of the full state."""
    run_id = create_ready_model(harness, harness.session())
    path = str(create_checkpoint(harness, run_id).path)

    answer = harness.post("/load_weights", {"model_id": run_id, "seq_id": 1, "path": path})

    assert load_payload(harness, answer.json()["request_id"]).with_optimizer is True


def test_repeated_load_returns_same_future_after_deletion(
    harness: ServerHarness,
) -> None:
    run_id = create_ready_model(harness, harness.session())
    checkpoint = create_checkpoint(harness, run_id)
    request = {"model_id": run_id, "seq_id": 1, "path": str(checkpoint.path)}
    first = load(harness, **request)
    harness.write(lambda db: checkpoints.delete(db, checkpoint.id, time.time()))

    assert load(harness, **request).json() == first.json()
    assert load(harness, **request | {"seq_id": 2}).status_code == 404


def test_load_weights_creates_model(harness: ServerHarness) -> None:
    session_id = harness.session()
    checkpoint = create_checkpoint(harness, create_ready_model(harness, session_id))
    request = {"session_id": session_id, "model_seq_id": 5, "path": str(checkpoint.path)}

    first, second = (load(harness, **request).json() for _ in range(2))

    assert first == second
    assert first["model_id"] == f"{session_id}:train:5"
    run = harness.read(lambda db: runs.find(db, first["model_id"]))
    assert (run.state, run.base_model) == (RunState.CREATING, BASE_MODEL)
    # The checkpoint is older than the LoRA options, and gets their defaults.
    options = {"alpha": 32.0, "use_rslora": False, "target_modules": None}
    assert run.spec == {**checkpoint.spec, **options, "gradient_shards": 1}
    assert job_of(harness, first["request_id"]).position == 0


def test_load_without_optimizer_state_uses_requested_optimizer(harness: ServerHarness) -> None:
    session_id = harness.session()
    path = str(create_checkpoint(harness, create_ready_model(harness, session_id)).path)
    request = {"session_id": session_id, "path": path, "optimizer": False}

    default = load(harness, **request, model_seq_id=1).json()["model_id"]
    chosen = {"type": "dimuon", "version": 1}
    named = load(harness, **request, model_seq_id=2, optimizer_config=chosen).json()["model_id"]

    assert harness.read(lambda db: runs.find(db, default)).spec["optimizer"] == {"type": "adamw"}
    assert harness.read(lambda db: runs.find(db, named)).spec["optimizer"] == chosen


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"path": "tinker://x/weights/y"}, 404, "checkpoint 'tinker://x/weights/y' does not exist"),
        ({"path": "nowhere"}, 422, "Invalid tinker path"),
        ({"model_seq_id": None}, 422, "needs model_id, or session_id and model_seq_id"),
        ({"session_id": None}, 422, "needs model_id, or session_id and model_seq_id"),
        ({"model_seq_id": -1}, 422, "model_seq_id"),
        ({"base_model": "other"}, 400, "'other' cannot be trained"),
        ({"model_seq_id": 0}, 400, "was used for create_model before"),
    ],
)
def test_invalid_load_returns_error_message(
    harness: ServerHarness, fields: dict[str, Any], status: int, words: str
) -> None:
    session_id = harness.session()
    path = str(create_checkpoint(harness, create_ready_model(harness, session_id)).path)

    answer = load(harness, **{"session_id": session_id, "model_seq_id": 1, "path": path} | fields)

    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_sampler_weights_cannot_be_loaded(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    path = str(create_checkpoint(harness, run_id, segment="sampler_weights").path)

    answer = load(harness, model_id=run_id, seq_id=1, path=path)

    assert answer.status_code == 400
    assert "is not a training checkpoint" in answer.json()["error"]


# --- reading what others own ---------------------------------------------------------------------
def test_load_published_or_shared_weights(
    harness: ServerHarness,
) -> None:
    checkpoint = create_checkpoint(harness, create_ready_model(harness, harness.session()))
    theirs = create_ready_model(harness, harness.session(OTHER_KEY), key=OTHER_KEY)
    request = {"model_id": theirs, "path": str(checkpoint.path)}

    private = load(harness, key=OTHER_KEY, seq_id=1, **request)
    wrong = load(harness, key=OTHER_KEY, seq_id=2, weights_access_token="tml-no", **request)
    lent = load(harness, key=OTHER_KEY, seq_id=3, weights_access_token=KEY, **request)
    publish_checkpoint(harness, checkpoint)
    public = load(harness, key=OTHER_KEY, seq_id=4, **request)

    statuses = [answer.status_code for answer in (private, wrong, lent, public)]
    assert statuses == [404, 404, 200, 200]
    assert private.json() == wrong.json()


def test_weights_info_describes_base_model_and_lora(harness: ServerHarness) -> None:
    checkpoint = create_checkpoint(harness, create_ready_model(harness, harness.session()))
    body = {"tinker_path": str(checkpoint.path)}

    info = harness.post("/weights_info", body)

    assert info.json() == {
        "base_model": BASE_MODEL,
        "is_lora": True,
        "lora_rank": 4,
        "train_unembed": True,
        "train_mlp": False,
        "train_attn": True,
        "optimizer_config": {"type": "dimuon", "version": 1},
    }
    assert harness.post("/weights_info", body, key=OTHER_KEY).status_code == 404
    lent = {"X-Tinker-Weights-Access-Token": KEY}
    assert harness.post("/weights_info", body, key=OTHER_KEY, headers=lent).status_code == 200


# --- copies --------------------------------------------------------------------------------------
def copy(harness: ServerHarness, key: str = KEY, repeat: str | None = None, **fields: Any) -> Any:
    headers = {"X-Idempotency-Key": repeat} if repeat else {}
    return harness.post("/copy_weights", fields, key=key, headers=headers)


def test_copied_checkpoint_is_independent(harness: ServerHarness) -> None:
    session_id = harness.session()
    source = create_checkpoint(
        harness, create_ready_model(harness, session_id), user_metadata={"k": "v"}
    )

    answer = copy(
        harness,
        source_path=str(source.path),
        session_id=session_id,
        model_seq_id=3,
        ttl_seconds=60,
    )

    path = parse_tinker_path(answer.json()["tinker_path"])
    assert (path.run_id, path.checkpoint_id) == (f"{session_id}:train:3", "weights/first")
    copied = harness.read(lambda db: checkpoints.find(db, path, time.time()))
    assert (copied.size_bytes, copied.user_metadata) == (source.size_bytes, {"k": "v"})
    assert copied.expires_at is not None and not copied.is_public
    directory = harness.services.home.checkpoint_directory(copied.id)
    assert set(check_manifest(directory).files) == set(FILES)
    harness.write(lambda db: checkpoints.delete(db, source.id, time.time()))
    assert harness.read(lambda db: checkpoints.find(db, path, time.time())) is not None
    assert events(harness)[-1] == "checkpoint_copied"
    run = harness.read(lambda db: runs.find(db, path.run_id))
    assert run.state == RunState.UNLOADED


def test_copy_uses_hard_links(harness: ServerHarness) -> None:
    source = create_checkpoint(harness, create_ready_model(harness, harness.session()))

    path = parse_tinker_path(copy(harness, source_path=str(source.path)).json()["tinker_path"])

    copied = harness.read(lambda db: checkpoints.find(db, path, time.time()))
    home = harness.services.home
    for name in FILES:
        assert (home.checkpoint_directory(source.id) / name).samefile(
            home.checkpoint_directory(copied.id) / name
        )


def test_repeated_copy_is_idempotent(harness: ServerHarness) -> None:
    source = create_checkpoint(harness, create_ready_model(harness, harness.session()))
    request = {"source_path": str(source.path), "destination_project_id": "research"}

    first, second = (copy(harness, repeat="one", **request).json() for _ in range(2))
    third = copy(harness, repeat="two", **request).json()

    assert first == second != third
    assert len(list(harness.services.home.checkpoints.iterdir())) == 3
    path = parse_tinker_path(first["tinker_path"])
    copied = harness.read(lambda db: checkpoints.find(db, path, time.time()))
    assert (copied.project_id, copied.tenant_id) == ("research", harness.tenant_id)
    listed = harness.send_request("GET", f"/training_runs/{path.run_id}/checkpoints").json()[
        "checkpoints"
    ]
    assert [row["tinker_path"] for row in listed] == [str(path)]


def test_copy_requires_published_or_shared_checkpoint(harness: ServerHarness) -> None:
    source = create_checkpoint(harness, create_ready_model(harness, harness.session()))
    request = {"source_path": str(source.path)}

    private = copy(harness, key=OTHER_KEY, **request)
    lent = copy(harness, key=OTHER_KEY, weights_access_token=KEY, **request)
    publish_checkpoint(harness, source)
    public = copy(harness, key=OTHER_KEY, **request)

    assert [answer.status_code for answer in (private, lent, public)] == [404, 200, 200]
    path = parse_tinker_path(public.json()["tinker_path"])
    copied = harness.read(lambda db: checkpoints.find(db, path, time.time()))
    assert (copied.tenant_id, copied.is_public) == (harness.other_tenant_id, False)


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
def test_failed_copy_leaves_no_files(
    harness: ServerHarness, fields: dict[str, Any], status: int
) -> None:
    source = create_checkpoint(harness, create_ready_model(harness, harness.session()))

    answer = copy(harness, **{"source_path": str(source.path)} | fields)

    assert answer.status_code == status
    left = [path.name for path in harness.services.home.checkpoints.iterdir()]
    assert left == [source.id]


def test_copy_conflict_leaves_no_files(harness: ServerHarness) -> None:
    session_id = harness.session()
    source = create_checkpoint(harness, create_ready_model(harness, session_id))

    answer = copy(harness, source_path=str(source.path), session_id=session_id, model_seq_id=0)

    assert answer.status_code == 400
    assert [path.name for path in harness.services.home.checkpoints.iterdir()] == [source.id]


def test_copy_with_lost_response_keeps_files(
    harness: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = create_checkpoint(harness, create_ready_model(harness, harness.session()))

    async def write_and_fail(*args: Any) -> Any:
        await write(*args)
        raise StoreUnavailable("the connection was lost after the commit")

    monkeypatch.setattr("tinkex.server.http.routes.weights.write", write_and_fail)

    assert copy(harness, source_path=str(source.path)).status_code >= 500
    known = harness.read(checkpoints.list_ids)
    assert len(known) == 2
    assert {path.name for path in harness.services.home.checkpoints.iterdir()} == known


def test_copy_of_damaged_files_leaves_no_files(harness: ServerHarness) -> None:
    source = create_checkpoint(harness, create_ready_model(harness, harness.session()))
    (harness.services.home.checkpoint_directory(source.id) / "adapter_config.json").unlink()

    answer = copy(harness, source_path=str(source.path))

    assert answer.status_code == 500
    assert f"checkpoint {source.path} is damaged" in answer.json()["error"]
    assert [path.name for path in harness.services.home.checkpoints.iterdir()] == [source.id]


def test_repeated_copy_returns_result_after_session_end(
    harness: ServerHarness,
) -> None:
    session_id = harness.session()
    source = create_checkpoint(harness, create_ready_model(harness, session_id))
    request = {"source_path": str(source.path), "session_id": session_id, "model_seq_id": 1}
    first = copy(harness, repeat="one", **request)
    harness.write(lambda db: sessions.finish(db, session_id, "success", None, time.time()))
    harness.write(lambda db: checkpoints.delete(db, source.id, time.time()))

    assert copy(harness, repeat="one", **request).json() == first.json()
    assert copy(harness, repeat="two", **request).status_code == 400
