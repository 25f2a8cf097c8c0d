"""Nobody can do anything with another tenant's things, nor find out that they exist."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import httpx
import pytest

from tests.support.server_harness import BASE_MODEL, OTHER_KEY, House, open_house
from tests.support.resources import Belongings, belongings, share
from tinkex import types
from tinkex.ids import TinkerPath
from tinkex.server.app import ROUTES
from tinkex.wire.endpoints import ENDPOINTS
from tinkex.wire.proto import encode_forward_backward_request

NOWHERE = "00000000-0000-4000-8000-000000000000"


class Names(NamedTuple):
    """What a request may name: somebody's, or nobody's."""

    session_id: str
    run_id: str
    sampler_id: str
    path: TinkerPath
    request_id: str


def names_of(owned: Belongings) -> Names:
    return Names(
        owned.session_id,
        owned.run_id,
        owned.sampler_id,
        owned.checkpoint.path,
        owned.request_id,
    )


NOBODYS = Names(
    NOWHERE,
    f"{NOWHERE}:train:0",
    f"{NOWHERE}:sample:0",
    TinkerPath(f"{NOWHERE}:train:0", "weights", "first"),
    "0" * 32 + "-" + "0" * 12,
)

Body: TypeAlias = dict[str, Any] | bytes | None
Ask: TypeAlias = Callable[[Names, Names], Body]
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
    "graph": {"format": 1, "nodes": [{"op": "output", "name": "output", "target": "output"}]},
}


def a_pass(model_id: str) -> bytes:
    work = types.ForwardBackwardInput([], "cross_entropy")
    return encode_forward_backward_request(types.ForwardBackwardRequest(work, model_id, 1))


#: For every endpoint, the requests that name something foreign. The path's names are foreign too.
FOREIGN: dict[str, list[Ask]] = {
    "session_heartbeat": [lambda it, _: {"session_id": it.session_id}],
    "finish_session": [lambda it, _: {"reason": {"type": "success"}}],
    "retrieve_future": [lambda it, _: {"request_id": it.request_id}],
    "retrieve_futures": [lambda it, _: {"target": {"sampling_session_id": it.sampler_id}}],
    "cancel_future": [lambda it, _: {"request_id": it.request_id}],
    "create_model": [
        # The first number was used by the owner.
        lambda it, _: {"session_id": it.session_id, "model_seq_id": 0, "base_model": BASE_MODEL},
        lambda it, _: {"session_id": it.session_id, "model_seq_id": 1, "base_model": BASE_MODEL},
    ],
    "forward_backward": [lambda it, _: a_pass(it.run_id)],
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
    "list_checkpoints": [lambda it, _: None],
    "list_model_checkpoints": [lambda it, _: None],
    "delete_checkpoint": [lambda it, _: None],
    "publish_checkpoint": [lambda it, _: None],
    "unpublish_checkpoint": [lambda it, _: None],
    "set_checkpoint_ttl": [lambda it, _: {"ttl_seconds": 60}],
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
#: Endpoints that name nothing: they answer about the caller.
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
    "list_sessions",
    "search_sessions",
    "get_audit_log",
    "get_billing_usage",
    "get_current_checkpoint_storage_usage",
    "get_quotas",
}
#: Which of these requests go through once the checkpoint is published: those that only read it.
READS = {
    "weights_info": {0},
    "external_weights_urls": {0},
    "checkpoint_archive": {0},
    "copy_weights": {0},
    "asample": {1},
    "create_sampling_session": {1},
    "load_weights": {1, 3},
}


class Street(NamedTuple):
    """A house with two tenants, and what is whose."""

    house: House
    theirs: Names
    own: Names


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    """Shared by all tests that must change nothing."""
    with open_house(tmp_path_factory.mktemp("street")) as house:
        theirs, own = belongings(house), belongings(house, OTHER_KEY)
        yield Street(house, names_of(theirs), names_of(own))


@pytest.fixture(scope="module")
def open_street(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    """The same, with a published checkpoint."""
    with open_house(tmp_path_factory.mktemp("open")) as house:
        theirs, own = belongings(house), belongings(house, OTHER_KEY)
        share(house, theirs.checkpoint)
        yield Street(house, names_of(theirs), names_of(own))


def test_every_endpoint_is_looked_at() -> None:
    assert FOREIGN.keys() | NAMELESS == ENDPOINTS.keys() == ROUTES.keys()
    assert not FOREIGN.keys() & NAMELESS


def send(house: House, name: str, names: Names, body: Body, key: str | None) -> httpx.Response:
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
    return house.ask(row.method, path, key=key, **options)


def words(answer: httpx.Response, names: Names) -> tuple[int, str]:
    """An answer with every name in it replaced by its kind."""
    text = json.dumps(answer.json(), sort_keys=True)
    for kind, name in zip(Names._fields, names, strict=True):
        text = text.replace(str(name), f"<{kind}>")
    return answer.status_code, text


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_what_is_foreign_is_answered_like_what_does_not_exist(street: Street, name: str) -> None:
    house, theirs, own = street
    before = inventory(house)

    for ask in FOREIGN[name]:
        foreign = send(house, name, theirs, ask(theirs, own), OTHER_KEY)
        nobodys = send(house, name, NOBODYS, ask(NOBODYS, own), OTHER_KEY)

        assert words(foreign, theirs) == words(nobodys, NOBODYS)
        assert foreign.status_code == 404
        assert foreign.json()["error"].startswith("there is no ")
    assert inventory(house) == before


@pytest.mark.parametrize("name", sorted(ENDPOINTS.keys() - {"health"}))
def test_without_a_good_key_nothing_is_answered_and_nothing_happens(
    street: Street, name: str
) -> None:
    house, owned, _ = street
    before = inventory(house)

    for key in (None, "tml-wrong", "eyJhbGciOiJIUzI1NiJ9.e30.x", "rubbish"):
        for ask in FOREIGN.get(name, [lambda *_: {}]):
            answers = [
                send(house, name, names, ask(names, owned), key) for names in (owned, NOBODYS)
            ]
            assert [answer.status_code for answer in answers] == [401, 401]
            assert answers[0].json() == answers[1].json()
    assert inventory(house) == before


def inventory(house: House) -> list[Any]:
    """Everything that the first tenant can see."""
    sessions = house.ask("GET", "/sessions").json()["sessions"]
    return [
        house.ask("GET", "/training_runs").json(),
        house.ask("GET", "/checkpoints").json(),
        house.ask("GET", "/audit").json(),
        [house.ask("GET", f"/sessions/{session_id}").json() for session_id in sessions],
        house.post("/sessions/search", {}).json(),
        len(list(house.services.home.checkpoints.iterdir())),
    ]


def test_lists_show_nothing_of_others(house: House) -> None:
    belongings(house)
    start, end = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    span = f"starting_on={start}&ending_before={end}"

    def ask(path: str) -> Any:
        return house.ask("GET", path, key=OTHER_KEY).json()

    assert ask("/training_runs?access_scope=accessible")["training_runs"] == []
    assert ask("/checkpoints")["checkpoints"] == []
    assert ask("/sessions?access_scope=accessible")["sessions"] == []
    assert {entry["event"] for entry in ask("/audit")["entries"]} == {"api_key_created"}
    assert ask(f"/billing/usage/events?{span}") == {"data": [], "sessions": {}}
    assert ask("/billing/usage/checkpoints/current")["data"] == []
    for owner in ("own", "accessible"):
        body = {"owner": {"type": owner}}
        assert house.post("/sessions/search", body, key=OTHER_KEY).json() == {"sessions": []}
    urns = {"owner": {"type": "user", "owner_urns": [f"tml:user:{house.tenant_id}"]}}
    assert house.post("/sessions/search", urns, key=OTHER_KEY).json() == {"sessions": []}


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_what_is_published_can_be_read_and_nothing_else(open_street: Street, name: str) -> None:
    house, theirs, own = open_street
    gone_through = set()

    for number, ask in enumerate(FOREIGN[name]):
        answer = send(house, name, theirs, ask(theirs, own), OTHER_KEY)
        if answer.status_code in {200, 302}:
            gone_through.add(number)
        else:
            nobodys = send(house, name, NOBODYS, ask(NOBODYS, own), OTHER_KEY)
            assert words(answer, theirs) == words(nobodys, NOBODYS)

    assert gone_through == READS.get(name, set())
