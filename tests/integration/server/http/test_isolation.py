"""Tenants cannot use another tenant's resources, nor find out that they exist."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import httpx
import pytest

from tests.support.resources import TenantResources, create_resources, publish_checkpoint
from tests.support.server_harness import BASE_MODEL, OTHER_KEY, ServerHarness, open_harness
from tinkex import types
from tinkex.ids import TinkerPath
from tinkex.server.app import ROUTES
from tinkex.wire.endpoints import ENDPOINTS
from tinkex.wire.proto import encode_forward_backward_request

MISSING_ID = "00000000-0000-4000-8000-000000000000"


class ResourceIds(NamedTuple):
    """Ids that a request may name: another tenant's, or missing ones."""

    session_id: str
    run_id: str
    sampler_id: str
    path: TinkerPath
    request_id: str


def resource_ids(resources: TenantResources) -> ResourceIds:
    return ResourceIds(
        resources.session_id,
        resources.run_id,
        resources.sampler_id,
        resources.checkpoint.path,
        resources.request_id,
    )


MISSING_IDS = ResourceIds(
    MISSING_ID,
    f"{MISSING_ID}:train:0",
    f"{MISSING_ID}:sample:0",
    TinkerPath(f"{MISSING_ID}:train:0", "weights", "first"),
    "0" * 32 + "-" + "0" * 12,
)

Body: TypeAlias = dict[str, Any] | bytes | None
MakeBody: TypeAlias = Callable[[ResourceIds, ResourceIds], Body]
"""Makes a request's body of foreign and own names."""

SAMPLE = {
    "num_samples": 1,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    "sampling_params": {},
}
LOSS = {
    "custom_loss_seq_id": 0,
    "name": "mine",
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {
        "format": 1,
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {
                "op": "call_function",
                "name": "s",
                "target": "torch.sum",
                "args": [{"ref": "logprobs"}],
            },
            {
                "op": "output",
                "name": "output",
                "target": "output",
                "args": [{"tuple": [{"ref": "s"}, {"dict": {}}]}],
            },
        ],
    },
}


def encode_pass(model_id: str) -> bytes:
    work = types.ForwardBackwardInput([], "cross_entropy")
    return encode_forward_backward_request(types.ForwardBackwardRequest(work, model_id, 1))


#: For every endpoint, requests that name resources of another tenant, also in the path.
FOREIGN: dict[str, list[MakeBody]] = {
    "session_heartbeat": [lambda it, _: {"session_id": it.session_id}],
    "finish_session": [lambda it, _: {"reason": {"type": "success"}}],
    "retrieve_future": [lambda it, _: {"request_id": it.request_id}],
    "retrieve_futures": [lambda it, _: {"target": {"sampling_session_id": it.sampler_id}}],
    "cancel_future": [lambda it, _: {"request_id": it.request_id}],
    "create_model": [
        # The owner has used the first number.
        lambda it, _: {"session_id": it.session_id, "model_seq_id": 0, "base_model": BASE_MODEL},
        lambda it, _: {"session_id": it.session_id, "model_seq_id": 1, "base_model": BASE_MODEL},
    ],
    "forward_backward": [lambda it, _: encode_pass(it.run_id)],
    "forward": [
        lambda it, _: {
            "model_id": it.run_id,
            "forward_input": {"data": [], "loss_fn": "cross_entropy"},
        }
    ],
    "optim_step": [
        lambda it, _: {"model_id": it.run_id, "seq_id": 1, "adam_params": {}},
        lambda it, _: {"model_id": it.run_id, "seq_id": 2, "adam_params": {}},
    ],
    "save_weights": [lambda it, _: {"model_id": it.run_id, "seq_id": 1, "path": "x"}],
    "save_weights_for_sampler": [lambda it, _: {"model_id": it.run_id, "path": "x"}],
    "save_weights_external": [lambda it, _: {"model_id": it.run_id, "path": "x"}],
    "load_weights": [
        lambda it, own: {"model_id": it.run_id, "path": str(own.path), "optimizer": True},
        lambda it, own: {"model_id": own.run_id, "path": str(it.path), "optimizer": True},
        lambda it, own: {
            "session_id": it.session_id,
            "model_seq_id": 0,
            "path": str(own.path),
            "optimizer": True,
        },
        lambda it, own: {
            "session_id": own.session_id,
            "model_seq_id": 9,
            "path": str(it.path),
            "optimizer": True,
        },
    ],
    "create_custom_loss": [lambda it, _: {"session_id": it.session_id, **LOSS}],
    "get_info": [lambda it, _: {"model_id": it.run_id}],
    "unload_model": [lambda it, _: {"model_id": it.run_id}],
    "create_sampling_session": [
        lambda it, _: {
            "session_id": it.session_id,
            "sampling_session_seq_id": 0,
            "base_model": BASE_MODEL,
        },
        lambda it, own: {
            "session_id": own.session_id,
            "sampling_session_seq_id": 9,
            "model_path": str(it.path),
        },
    ],
    "join_sampling_session": [lambda it, _: {"sampling_session_id": it.sampler_id}],
    "asample": [
        lambda it, _: {"sampling_session_id": it.sampler_id, "seq_id": 0, **SAMPLE},
        lambda it, _: {"model_path": str(it.path), **SAMPLE},
    ],
    "get_sampler": [lambda it, _: None],
    "get_training_run": [lambda it, _: None],
    "get_run_metrics": [lambda it, _: None],
    "report_run_metrics": [lambda it, _: {"seq_id": 1, "metrics": {"reward": 1.0}}],
    "rename_training_run": [lambda it, _: {"name": "mine now"}],
    "set_training_run_tags": [lambda it, _: {"tags": ["mine"]}],
    "list_checkpoints": [lambda it, _: None],
    "list_model_checkpoints": [lambda it, _: None],
    "delete_checkpoint": [lambda it, _: None],
    "publish_checkpoint": [lambda it, _: None],
    "unpublish_checkpoint": [lambda it, _: None],
    "set_checkpoint_ttl": [lambda it, _: {"ttl_seconds": 60}],
    "set_alias": [lambda it, _: {"name": "mine", "tinker_path": str(it.path)}],
    "external_weights_urls": [lambda it, _: None],
    "checkpoint_archive": [lambda it, _: None],
    "weights_info": [lambda it, _: {"tinker_path": str(it.path)}],
    "copy_weights": [
        lambda it, _: {"source_path": str(it.path)},
        lambda it, own: {
            "source_path": str(own.path),
            "session_id": it.session_id,
            "model_seq_id": 0,
        },
    ],
    "get_session": [lambda it, _: None],
    "assign_session_project": [lambda it, _: {"project_id": "theirs"}],
    "export_session_trace": [lambda it, _: None],
}
#: Endpoints without ids: they return data of the caller.
NAMELESS = {
    "health",
    "get_server_capabilities",
    "get_tokenizer",
    "client_config",
    "client_dynamic_config",
    "auth_token",
    "get_api_key",
    "delete_api_key",
    "create_session",
    "telemetry",
    "list_training_runs",
    "list_user_checkpoints",
    "list_aliases",
    "delete_alias",
    "list_sessions",
    "search_checkpoints",
    "search_sessions",
    "get_audit_log",
    "get_billing_usage",
    "get_current_checkpoint_storage_usage",
    "get_quotas",
}
#: Requests that succeed once the checkpoint is published: those that only read it.
READS = {
    "set_alias": {0},
    "weights_info": {0},
    "external_weights_urls": {0},
    "checkpoint_archive": {0},
    "copy_weights": {0},
    "asample": {1},
    "create_sampling_session": {1},
    "load_weights": {1, 3},
}


class TwoTenants(NamedTuple):
    """A server with two tenants and the ids of their resources."""

    harness: ServerHarness
    theirs: ResourceIds
    own: ResourceIds


@pytest.fixture(scope="module")
def two_tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoTenants]:
    """Shared by all tests without side effects."""
    with open_harness(tmp_path_factory.mktemp("street")) as harness:
        theirs, own = create_resources(harness), create_resources(harness, OTHER_KEY)
        yield TwoTenants(harness, resource_ids(theirs), resource_ids(own))


@pytest.fixture(scope="module")
def two_tenants_published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoTenants]:
    """The same, with a published checkpoint."""
    with open_harness(tmp_path_factory.mktemp("open")) as harness:
        theirs, own = create_resources(harness), create_resources(harness, OTHER_KEY)
        publish_checkpoint(harness, theirs.checkpoint)
        yield TwoTenants(harness, resource_ids(theirs), resource_ids(own))


def test_every_endpoint_has_isolation_cases() -> None:
    assert FOREIGN.keys() | NAMELESS == ENDPOINTS.keys() == ROUTES.keys()
    assert not FOREIGN.keys() & NAMELESS


def send(
    harness: ServerHarness, name: str, names: ResourceIds, body: Body, key: str | None
) -> httpx.Response:
    row = ENDPOINTS[name]
    path = row.path.replace("{training_run_id}", names.run_id)
    path = path.replace("{checkpoint_id}", names.path.checkpoint_id)
    path = path.replace("{session_id}", names.session_id)
    path = path.replace("{sampler_id}", names.sampler_id)
    options: dict[str, Any] = {"follow_redirects": False}
    if isinstance(body, bytes):
        options |= {"content": body, "headers": {"content-type": "application/x-protobuf"}}
    elif body is not None:
        options["json"] = body
    return harness.send_request(row.method, path, key=key, **options)


def words(answer: httpx.Response, names: ResourceIds) -> tuple[int, str]:
    """A response with every id replaced by its kind."""
    text = json.dumps(answer.json(), sort_keys=True)
    for kind, name in zip(ResourceIds._fields, names, strict=True):
        text = text.replace(str(name), f"<{kind}>")
    return answer.status_code, text


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_other_tenants_resource_returns_same_error_as_missing(
    two_tenants: TwoTenants, name: str
) -> None:
    harness, theirs, own = two_tenants
    before = inventory(harness)

    for send_request in FOREIGN[name]:
        foreign = send(harness, name, theirs, send_request(theirs, own), OTHER_KEY)
        missing = send(harness, name, MISSING_IDS, send_request(MISSING_IDS, own), OTHER_KEY)

        assert words(foreign, theirs) == words(missing, MISSING_IDS)
        assert foreign.status_code == 404
        assert foreign.json()["error"].endswith(" does not exist")
    assert inventory(harness) == before


@pytest.mark.parametrize("name", sorted(ENDPOINTS.keys() - {"health"}))
def test_invalid_key_is_rejected_without_side_effects(two_tenants: TwoTenants, name: str) -> None:
    harness, resources, _ = two_tenants
    before = inventory(harness)

    for key in (None, "tml-wrong", "eyJhbGciOiJIUzI1NiJ9.e30.x", "rubbish"):
        for send_request in FOREIGN.get(name, [lambda *_: {}]):
            answers = [
                send(harness, name, names, send_request(names, resources), key)
                for names in (resources, MISSING_IDS)
            ]
            assert [answer.status_code for answer in answers] == [401, 401]
            assert answers[0].json() == answers[1].json()
    assert inventory(harness) == before


def inventory(harness: ServerHarness) -> list[Any]:
    """All resources that the first tenant can see."""
    sessions = harness.send_request("GET", "/sessions").json()["sessions"]
    return [
        harness.send_request("GET", "/training_runs").json(),
        harness.send_request("GET", "/checkpoints").json(),
        harness.send_request("GET", "/audit").json(),
        [harness.send_request("GET", f"/sessions/{session_id}").json() for session_id in sessions],
        harness.post("/sessions/search", {}).json(),
        len(list(harness.services.home.checkpoints.iterdir())),
    ]


def test_lists_exclude_other_tenants(harness: ServerHarness) -> None:
    create_resources(harness)
    start, end = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    span = f"starting_on={start}&ending_before={end}"

    def send_request(path: str) -> Any:
        return harness.send_request("GET", path, key=OTHER_KEY).json()

    assert send_request("/training_runs?access_scope=accessible")["training_runs"] == []
    assert send_request("/checkpoints")["checkpoints"] == []
    assert send_request("/sessions?access_scope=accessible")["sessions"] == []
    assert {entry["event"] for entry in send_request("/audit")["entries"]} == {"api_key_created"}
    assert send_request(f"/billing/usage/events?{span}") == {"data": [], "sessions": {}}
    assert send_request("/billing/usage/checkpoints/current")["data"] == []
    for owner in ("own", "accessible"):
        body = {"owner": {"type": owner}}
        assert harness.post("/sessions/search", body, key=OTHER_KEY).json() == {"sessions": []}
        found = harness.post("/checkpoints/search", body, key=OTHER_KEY).json()
        assert found == {"checkpoints": []}
    owner_filter = {"owner": {"type": "user", "owner_urns": [f"tml:user:{harness.tenant_id}"]}}
    assert harness.post("/sessions/search", owner_filter, key=OTHER_KEY).json() == {"sessions": []}
    found = harness.post("/checkpoints/search", owner_filter, key=OTHER_KEY).json()
    assert found == {"checkpoints": []}
    assert len(harness.post("/checkpoints/search", owner_filter).json()["checkpoints"]) == 1


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_published_checkpoint_is_read_only_for_others(
    two_tenants_published: TwoTenants, name: str
) -> None:
    harness, theirs, own = two_tenants_published
    gone_through = set()

    for number, send_request in enumerate(FOREIGN[name]):
        answer = send(harness, name, theirs, send_request(theirs, own), OTHER_KEY)
        if answer.status_code in {200, 302}:
            gone_through.add(number)
        else:
            missing = send(harness, name, MISSING_IDS, send_request(MISSING_IDS, own), OTHER_KEY)
            assert words(answer, theirs) == words(missing, MISSING_IDS)

    assert gone_through == READS.get(name, set())
