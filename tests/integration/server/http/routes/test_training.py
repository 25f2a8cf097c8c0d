from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.resources import create_model, create_ready_model
from tests.support.server_harness import (
    BASE_MODEL,
    OTHER_KEY,
    ServerHarness,
    clear_base_models,
    open_harness,
    publish_empty_models,
)
from tinkex import types
from tinkex.engine.custom_losses.graphs import make_loss_id
from tinkex.store import jobs, runs, schema, sessions
from tinkex.store.records import RunState
from tinkex.wire.proto import encode_forward_backward_request


def job_of(harness: ServerHarness, request_id: str) -> Any:
    return harness.read(lambda db: jobs.find(db, request_id))


def payload_of(harness: ServerHarness, request_id: str) -> bytes:
    return harness.read(lambda db: jobs.get_payloads(db, [request_id]))[request_id]


def datum(tokens: Sequence[int] = (1, 2, 3)) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": [2] * len(tokens), "weights": [1.0] * len(tokens)},
    )


def proto_pass(
    model_id: str,
    seq_id: int,
    data: Sequence[types.Datum] | None = None,
    *,
    forward_only: bool = False,
) -> bytes:
    data = [datum()] if data is None else data
    request = types.ForwardBackwardRequest(
        types.ForwardBackwardInput(data, "cross_entropy"), model_id, seq_id
    )
    return encode_forward_backward_request(request, forward_only)


def send_pass(harness: ServerHarness, body: bytes) -> Any:
    headers = {"content-type": "application/x-protobuf"}
    return harness.send_request("POST", "/forward_backward", content=body, headers=headers)


# --- making a model ----------------------------------------------------------------------------
def test_create_model_inserts_run_and_job_atomically(harness: ServerHarness) -> None:
    session_id = harness.session()

    answer = create_model(
        harness,
        session_id,
        lora_config={"rank": 8, "seed": 3, "train_mlp": False},
        optimizer_config={"type": "dimuon", "version": 1},
        user_metadata={"team": "blue", "size": 3},
    )

    assert answer.json()["model_id"] == f"{session_id}:train:0"
    run = harness.read(lambda db: runs.find(db, f"{session_id}:train:0"))
    assert (run.state, run.tenant_id) == (RunState.CREATING, harness.tenant_id)
    assert run.spec == {
        "base_model": BASE_MODEL,
        "rank": 8,
        "seed": 3,
        "train_unembed": True,
        "train_mlp": False,
        "train_attn": True,
        "alpha": 32.0,
        "use_rslora": False,
        "target_modules": None,
        "optimizer": {"type": "dimuon", "version": 1},
        "gradient_shards": 1,
    }
    assert run.user_metadata == {"team": "blue", "size": 3}
    job = job_of(harness, answer.json()["request_id"])
    assert (job.kind, job.run_id, job.position) == ("create_model", run.id, 0)


def test_create_model_generates_seed(harness: ServerHarness) -> None:
    session_id = harness.session()
    for number in (0, 1):
        create_model(harness, session_id, model_seq_id=number)

    records = harness.read(lambda db: runs.list_by_session(db, session_id))
    assert records[0].spec["seed"] != records[1].spec["seed"]


def test_repeated_create_model_returns_same_future(harness: ServerHarness) -> None:
    session_id = harness.session()

    first, second = (create_model(harness, session_id).json() for _ in range(2))

    assert first == second
    assert len(harness.read(lambda db: runs.list_by_session(db, session_id))) == 1


def test_create_model_for_existing_run_without_job_is_rejected(harness: ServerHarness) -> None:
    session_id = harness.session()
    run_id = create_ready_model(harness, session_id)
    run = harness.read(lambda db: runs.find(db, run_id))
    other = harness.session()
    # As if the job had been deleted by retention: the run exists, its job does not.
    harness.write(lambda db: runs.insert(db, _renamed(run, f"{other}:train:0", other)))

    answer = create_model(harness, other)

    assert answer.status_code == 400
    assert "already exists" in answer.json()["error"]


def _renamed(run: Any, run_id: str, session_id: str) -> Any:
    values = {name: getattr(run, name) for name in run.__slots__}
    return type(run)(**(values | {"id": run_id, "session_id": session_id}))


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"base_model": "gpt-x"}, 400, f"'gpt-x' cannot be trained here; available: {BASE_MODEL}"),
        ({"lora_config": {"rank": 0}}, 422, "rank is 0"),
        ({"lora_config": {"rank": 513}}, 422, "lora_config.rank is 513; expected 1 to 512"),
        ({"lora_config": {"rank": 1, "seed": 2**63}}, 422, "lora_config.seed"),
        ({"model_seq_id": -1}, 422, "model_seq_id is -1"),
        ({"model_seq_id": 2**63}, 422, "model_seq_id"),
        ({"optimizer_config": {"type": "sgd"}}, 400, "unknown optimizer 'sgd'"),
        ({"optimizer_config": {"type": "dimuon", "version": 2}}, 400, "settings of 'dimuon'"),
        ({"session_id": "nobody's"}, 404, 'session "nobody\'s" does not exist'),
        ({"session_id": "a/b"}, 422, "Invalid session id"),
        ({"user_metadata": {"x": "y" * 70_000}}, 422, "user_metadata has"),
    ],
)
def test_invalid_create_model_returns_error_message(
    harness: ServerHarness, fields: dict[str, Any], status: int, words: str
) -> None:
    session_id = harness.session()

    answer = create_model(harness, **({"session_id": session_id} | fields))

    assert answer.status_code == status
    assert words in answer.json()["error"]
    assert harness.read(lambda db: runs.list_by_session(db, session_id)) == []


def test_finished_session_rejects_create_model(harness: ServerHarness) -> None:
    session_id = harness.session()
    harness.write(lambda db: sessions.finish(db, session_id, "success", None, time.time()))

    answer = create_model(harness, session_id)

    assert answer.status_code == 400
    assert "was finished" in answer.json()["error"]


def test_create_model_before_worker_start_returns_retry(harness: ServerHarness) -> None:
    harness.write(clear_base_models)

    answer = create_model(harness, harness.session())

    assert answer.status_code == 503
    assert "retry-after" in answer.headers


def test_create_model_without_base_models_is_not_retryable(
    harness: ServerHarness,
) -> None:
    harness.write(publish_empty_models)

    answer = create_model(harness, harness.session())

    assert answer.status_code == 400
    assert "`tinkex model add tinkex/bigram`" in answer.json()["error"]


# --- operations ----------------------------------------------------------------------------------
def test_pass_payload_and_position_are_stored(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    body = proto_pass(run_id, 5)

    future = send_pass(harness, body).json()

    job = job_of(harness, future["request_id"])
    assert (job.kind, job.position, job.is_proto) == ("forward_backward", 5, True)
    assert future["model_id"] == run_id
    assert payload_of(harness, job.id) == body


def test_forward_only_pass_is_forward_job(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())

    future = send_pass(harness, proto_pass(run_id, 1, forward_only=True)).json()

    assert job_of(harness, future["request_id"]).kind == "forward"


def test_older_clients_send_passes_as_json(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    chunks = [{"type": "encoded_text", "tokens": [1]}]
    targets = {"data": [2], "dtype": "int64", "shape": [1]}
    data = [{"model_input": {"chunks": chunks}, "loss_fn_inputs": {"target_tokens": targets}}]
    work = {"data": data, "loss_fn": "cross_entropy"}

    both = harness.post(
        "/forward_backward", {"model_id": run_id, "seq_id": 1, "forward_backward_input": work}
    )
    forward = harness.post("/forward", {"model_id": run_id, "seq_id": 2, "forward_input": work})

    kinds = [job_of(harness, answer.json()["request_id"]).kind for answer in (both, forward)]
    assert kinds == ["forward_backward", "forward"]


def test_pass_stores_number_of_tokens(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())

    future = send_pass(harness, proto_pass(run_id, 1, [datum(), datum([1] * 7)])).json()

    assert job_of(harness, future["request_id"]).num_tokens == 10


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "data is empty"),
        ([datum([512])], "token 512, outside the vocabulary of 512"),
        ([datum([1] * 513)], "513 tokens; this model reads at most 512"),
        ([datum([])], "example 0 has no input tokens"),
    ],
)
def test_invalid_pass_is_rejected_before_queueing(
    harness: ServerHarness, data: list[types.Datum], words: str
) -> None:
    run_id = create_ready_model(harness, harness.session())

    answer = send_pass(harness, proto_pass(run_id, 1, data))

    assert answer.status_code == 422
    assert words in answer.json()["error"]
    # Its sequence number is marked as used, so that the next operation does not wait for it.
    *_, tombstone = harness.read(lambda db: jobs.list_queued_after(db, 0))
    assert (tombstone.position, tombstone.payload_bytes) == (1, 0)
    assert tombstone.cancelled_at is not None


def test_pass_above_token_limit_is_rejected(tmp_path: Path) -> None:
    with open_harness(tmp_path / "home", max_request_tokens=20) as harness:
        run_id = create_ready_model(harness, harness.session())
        fits = send_pass(harness, proto_pass(run_id, 1, [datum([1] * 10)] * 2))
        answer = send_pass(harness, proto_pass(run_id, 2, [datum([1] * 7)] * 3))
    assert fits.status_code == 200
    assert answer.status_code == 422
    assert "has 21 tokens; the limit of one training request is 20" in answer.json()["error"]


def test_repeated_operation_returns_same_future(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    step = {"model_id": run_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}

    first, second = (harness.post("/optim_step", step).json() for _ in range(2))

    assert first == second


@pytest.mark.parametrize(
    ("optimizer", "params"),
    [
        ("dimuon", {"adam_params": {}}),
        ("adamw", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}),
        ("adamw", {"optimizer_params": {"type": "new"}}),
    ],
)
def test_step_of_other_optimizer_is_rejected_before_queueing(
    harness: ServerHarness, optimizer: str, params: dict[str, Any]
) -> None:
    answer = create_model(harness, harness.session(), optimizer_config={"type": optimizer})
    step = {"model_id": answer.json()["model_id"], "seq_id": 1}

    refused = harness.post("/optim_step", step | params)

    assert refused.status_code == 422
    assert f"but the adapter trains with {optimizer!r}" in refused.json()["error"]
    *_, tombstone = harness.read(lambda db: jobs.list_queued_after(db, 0))
    assert tombstone.position == 1
    assert tombstone.cancelled_at is not None


def test_reused_seq_id_of_other_operation_is_rejected(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    harness.post("/optim_step", {"model_id": run_id, "seq_id": 1, "adam_params": {}})

    answer = send_pass(harness, proto_pass(run_id, 1))

    assert answer.status_code == 400
    assert "was used for optim_step before" in answer.json()["error"]


def test_operation_without_seq_id_is_appended(
    harness: ServerHarness,
) -> None:
    run_id = create_ready_model(harness, harness.session())
    for seq_id in (1, 7):
        harness.post("/optim_step", {"model_id": run_id, "seq_id": seq_id, "adam_params": {}})

    unnumbered = [send_pass(harness, proto_pass(run_id, 0)).json() for _ in range(2)]

    positions = [job_of(harness, future["request_id"]).position for future in unnumbered]
    assert positions == [8, 9]


def test_operation_updates_last_used_time(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    reply = harness.post("/optim_step", {"model_id": run_id, "seq_id": 1, "adam_params": {}})
    job = job_of(harness, reply.json()["request_id"])
    finished_at = time.time() + 60

    harness.write(
        lambda db: jobs.finish(
            db, jobs.JobEnding(job=job, started_at=finished_at, finished_at=finished_at)
        )
    )

    assert harness.read(lambda db: runs.find(db, run_id)).used_at == finished_at


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            RunState.UNLOADED,
            "was unloaded; to continue, create a model from one of its",
        ),
        (RunState.FAILED, "could not be created"),
        (RunState.CORRUPTED, "has lost its state"),
    ],
)
def test_unloaded_model_error_names_reason_and_fix(
    harness: ServerHarness, state: RunState, words: str
) -> None:
    run_id = create_ready_model(harness, harness.session())
    harness.write(lambda db: runs.set_state(db, run_id, state))

    answer = harness.post("/optim_step", {"model_id": run_id, "seq_id": 1, "adam_params": {}})

    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_future_of_unloaded_model_is_still_returned(
    harness: ServerHarness,
) -> None:
    run_id = create_ready_model(harness, harness.session())
    step = {"model_id": run_id, "seq_id": 1, "adam_params": {}}
    first = harness.post("/optim_step", step).json()
    harness.write(lambda db: runs.set_state(db, run_id, RunState.UNLOADED))

    assert harness.post("/optim_step", step).json() == first


@pytest.mark.parametrize("seq_id", [-1, 2**63, 2**70])
def test_out_of_range_integers_are_rejected(harness: ServerHarness, seq_id: int) -> None:
    run_id = create_ready_model(harness, harness.session())

    answer = harness.post("/optim_step", {"model_id": run_id, "seq_id": seq_id, "adam_params": {}})

    assert answer.status_code == 422


def test_unload_is_queued_after_pending_operations(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    harness.post("/optim_step", {"model_id": run_id, "seq_id": 3, "adam_params": {}})

    future = harness.post("/unload_model", {"model_id": run_id}).json()

    job = job_of(harness, future["request_id"])
    assert (job.kind, job.position) == ("unload_model", 4)


def custom_loss(session_id: str, target: str = "torch.sum") -> dict[str, Any]:
    nodes: list[dict[str, Any]] = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_function", "name": "last", "target": target, "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "output", "target": "output"},
    ]
    nodes[-1]["args"] = [{"tuple": [{"ref": "last"}, {"dict": {}}]}]
    return {
        "session_id": session_id,
        "custom_loss_seq_id": 0,
        "name": "mine",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
    }


def test_custom_loss_is_submitted_once_per_seq_id(harness: ServerHarness) -> None:
    session_id = harness.session()
    body = custom_loss(session_id)

    first, second = (harness.post("/create_custom_loss", body).json() for _ in range(2))

    assert first == second
    assert job_of(harness, first["request_id"]).session_id == session_id


def test_custom_loss_with_unknown_operation_is_rejected_at_once(harness: ServerHarness) -> None:
    answer = harness.post("/create_custom_loss", custom_loss(harness.session(), "os.system"))
    assert answer.status_code == 422
    assert "'os.system', which is not among the operations" in answer.json()["error"]


def make_custom_pass(run_id: str, seq_id: int, target: str) -> bytes:
    body = custom_loss("s", target)
    request = types.CreateCustomLossRequest.model_validate(body)
    batch = types.ForwardBackwardInput(
        [datum([1, 2, 3])], "custom", {"loss_id": make_loss_id(request.inputs, request.graph)}
    )
    return encode_forward_backward_request(types.ForwardBackwardRequest(batch, run_id, seq_id))


def test_custom_loss_is_computed_before_queueing(harness: ServerHarness) -> None:
    """A loss that is not a scalar is rejected when the pass arrives."""
    run_id = create_ready_model(harness, harness.session())

    fine = send_pass(harness, make_custom_pass(run_id, 1, "torch.sum"))
    refused = send_pass(harness, make_custom_pass(run_id, 2, "torch.exp"))

    assert fine.status_code == 200
    assert refused.status_code == 422
    assert "returns (3,) as the loss; expected a scalar" in refused.json()["error"]


def test_operator_can_refuse_custom_losses(tmp_path: Path) -> None:
    with open_harness(tmp_path / "home", custom_losses=False) as harness:
        session_id = harness.session()
        run_id = create_ready_model(harness, session_id)
        upload = harness.post("/create_custom_loss", custom_loss(session_id))
        passed = send_pass(harness, make_custom_pass(run_id, 1, "torch.sum"))
        flags = harness.post("/client/config", {"sdk_version": "0.36.0"}).json()
    assert not flags["custom_loss_server_side"]
    for answer in (upload, passed):
        assert answer.status_code == 422
        assert "does not compute uploaded losses" in answer.json()["error"]


def test_get_info_describes_model_and_optimizer(harness: ServerHarness) -> None:
    session_id = harness.session()
    run_id = create_ready_model(harness, session_id)

    info = harness.post("/get_info", {"model_id": run_id}).json()

    assert info == {
        "type": "get_info",
        "model_id": run_id,
        "model_data": {"arch": "bigram", "model_name": BASE_MODEL, "tokenizer_id": BASE_MODEL},
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": 4,
        "model_name": BASE_MODEL,
    }


def test_other_tenants_model_returns_404_for_used_and_unused_seq_ids(
    harness: ServerHarness,
) -> None:
    run_id = create_ready_model(harness, harness.session())
    step = {"model_id": run_id, "seq_id": 1, "adam_params": {}}
    harness.post("/optim_step", step)

    answers = [harness.post("/optim_step", step | {"seq_id": n}, key=OTHER_KEY) for n in (1, 2)]

    for answer in answers:
        assert answer.status_code == 404
        assert answer.json()["error"] == f"model {run_id!r} does not exist"


def test_operation_up_to_forgotten_seq_returns_410(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    harness.write(lambda db: db.execute(sa.update(schema.runs).values(forgotten_seq=5)))

    old, new = (
        harness.post("/optim_step", {"model_id": run_id, "seq_id": number, "adam_params": {}})
        for number in (5, 6)
    )

    assert (old.status_code, new.status_code) == (410, 200)
    assert "not run again" in old.json()["error"]
