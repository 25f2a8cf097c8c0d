"""Names of models: base models, paths, short names, aliases, and those of other tenants."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest

from tests.integration.conftest import datum
from tests.integration.server.inference.conftest import (
    KEY,
    MODEL,
    OTHER_KEY,
    Connect,
    complete,
)
from tinkex import AdamParams, ServiceClient
from tinkex.client.rest import RestClient
from tinkex.errors import NotFoundError
from tinkex.testing import StubServer

COMPLETIONS = "/v1/completions"


class Trained:
    """A run with two sampler checkpoints that differ from the base model."""

    def __init__(self, service: ServiceClient) -> None:
        client = service.create_lora_training_client(MODEL, rank=4)
        self.paths = []
        for name in ("first", "second"):
            client.forward_backward([datum()], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=0.5)).result(60)
            self.paths.append(client.save_weights_for_sampler(name).result(60).path)
        self.state_path = client.save_state("state").result(60).path
        self.run_id = self.paths[0].removeprefix("tinker://").partition("/")[0]


@pytest.fixture(scope="module")
def service(server: StubServer) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=server.url, api_key=KEY) as opened:
        yield opened


@pytest.fixture(scope="module")
def rest(server: StubServer) -> Iterator[RestClient]:
    opened = RestClient(base_url=server.url, api_key=KEY)
    yield opened
    opened.holder.close("success").result(60)


@pytest.fixture(scope="module")
def trained(service: ServiceClient) -> Trained:
    return Trained(service)


def score(client: httpx.Client, model: str) -> list[float]:
    """Log-probabilities of a text under a model, which identify its weights."""
    body = {"model": model, "prompt": "hello hello", "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = complete(client, COMPLETIONS, body | {"add_special_tokens": False})
    assert answer["model"] == model
    scores: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
    return scores


def refuse(client: httpx.Client, model: str, status: int = 404) -> str:
    reply = client.post(COMPLETIONS, json={"model": model, "prompt": "x"})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["param"] == "model"
    assert error["code"] == ("model_not_found" if status == 404 else None)
    message: str = error["message"]
    return message


def test_all_forms(client: httpx.Client, trained: Trained, rest: RestClient) -> None:
    first, second = (score(client, path) for path in trained.paths)
    base = score(client, MODEL)
    assert len({tuple(scores) for scores in (base, first, second)}) == 3
    assert score(client, f"{MODEL}:peft:262144") == base
    assert score(client, f"{MODEL};{trained.paths[0]}") == first
    assert score(client, f"{MODEL}:peft:32k;{trained.paths[1]}") == second
    assert score(client, f"{trained.run_id}/first") == first
    assert score(client, f"{trained.run_id}@latest") == second
    assert score(client, "first") == first
    assert score(client, trained.state_path) == second
    rest.set_alias(trained.paths[0], "pirate").result(60)
    assert score(client, "pirate") == first
    moved = rest.set_alias(trained.paths[1], "pirate").result(60)
    assert moved.previous_path == trained.paths[0]
    assert score(client, "pirate") == second


def test_wrong_base(client: httpx.Client, trained: Trained) -> None:
    assert MODEL in refuse(client, f"tinkex/scripted;{trained.paths[0]}", 400)


def test_ambiguous_name(client: httpx.Client, trained: Trained, service: ServiceClient) -> None:
    other = Trained(service)
    message = refuse(client, "first", 400)
    assert trained.paths[0] in message
    assert other.paths[0] in message


def test_unknown_and_foreign_names_are_alike(
    client: httpx.Client, connect: Connect, trained: Trained, rest: RestClient
) -> None:
    rest.set_alias(trained.paths[0], "mine").result(60)
    bob = connect(OTHER_KEY)
    unknown = refuse(bob, "tinker://nobody/sampler_weights/x")
    for name in (
        *trained.paths,
        f"{MODEL};{trained.paths[0]}",
        f"{trained.run_id}/first",
        f"{trained.run_id}@latest",
        "second",
        "mine",
        "tinker://broken",
        "no such model",
        "@latest",
        ";",
        "/",
    ):
        assert refuse(bob, name) == unknown.replace("tinker://nobody/sampler_weights/x", name)
    assert refuse(bob, "", 400)
    assert refuse(bob, "x" * 5000, 400)
    ids = [entry["id"] for entry in bob.get("/v1/models").json()["data"]]
    assert ids == [MODEL, "tinkex/scripted"]


def test_published_checkpoints(
    client: httpx.Client, connect: Connect, trained: Trained, rest: RestClient
) -> None:
    bob = connect(OTHER_KEY)
    rest.publish_checkpoint_from_tinker_path(trained.paths[0]).result(60)
    assert score(bob, trained.paths[0]) == score(client, trained.paths[0])
    entry = bob.get(f"/v1/models/{trained.paths[0]}").json()
    assert entry["owned_by"] == "public"
    refuse(bob, "first")
    rest.unpublish_checkpoint_from_tinker_path(trained.paths[0]).result(60)
    refuse(bob, trained.paths[0])


def test_list_of_models(client: httpx.Client, trained: Trained, rest: RestClient) -> None:
    rest.set_alias(trained.paths[0], "listed").result(60)
    data = client.get("/v1/models").json()["data"]
    ids = [entry["id"] for entry in data]
    assert ids[:2] == [MODEL, "tinkex/scripted"]
    assert ids.index(trained.paths[1]) < ids.index(trained.paths[0]) < ids.index("listed")
    for model_id in (MODEL, trained.paths[0], "listed"):
        entry = data[ids.index(model_id)]
        assert set(entry) == {
            "id",
            "object",
            "created",
            "owned_by",
            "root",
            "parent",
            "max_model_len",
        }
        for path in (model_id, quote(model_id, safe="")):
            assert client.get(f"/oai/api/v1/models/{path}").json() == entry
    assert data[ids.index("listed")]["root"] == trained.paths[0]
    assert data[ids.index(trained.paths[0])]["parent"] == MODEL
    assert len(client.get("/v1/models?limit=1").json()["data"]) == 1
    for limit in ("0", "1001", "x", "-1", "9" * 30, "000000001999999"):
        assert client.get(f"/v1/models?limit={limit}").status_code == 400
    assert client.get("/v1/models/nothing").status_code == 404


def test_aliases(trained: Trained, rest: RestClient, server: StubServer) -> None:
    rest.set_alias(trained.paths[0], "a.b-c_1").result(60)
    assert rest.list_aliases().result(60)["a.b-c_1"] == trained.paths[0]
    rest.delete_alias("a.b-c_1").result(60)
    assert "a.b-c_1" not in rest.list_aliases().result(60)
    with pytest.raises(NotFoundError):
        rest.delete_alias("a.b-c_1").result(60)
    for name in ("", "a/b", "a:b", "x" * 129, "-x", "a@latest"):
        with pytest.raises(Exception, match="Invalid alias"):
            rest.set_alias(trained.paths[0], name).result(60)
    theirs = RestClient(base_url=server.url, api_key=OTHER_KEY)
    assert theirs.list_aliases().result(60) == {}
    with pytest.raises(NotFoundError):
        theirs.set_alias(trained.paths[0], "stolen").result(60)
    theirs.holder.close("success").result(60)


def test_alias_of_deleted_checkpoint(
    client: httpx.Client, service: ServiceClient, rest: RestClient
) -> None:
    gone = Trained(service)
    rest.set_alias(gone.paths[0], "gone").result(60)
    rest.delete_checkpoint_from_tinker_path(gone.paths[0]).result(60)
    refuse(client, "gone")
    assert "gone" not in rest.list_aliases().result(60)


def test_alias_of_unpublished_checkpoint(
    connect: Connect, service: ServiceClient, rest: RestClient, server: StubServer
) -> None:
    path = Trained(service).paths[0]
    rest.publish_checkpoint_from_tinker_path(path).result(60)
    theirs, bob = RestClient(base_url=server.url, api_key=OTHER_KEY), connect(OTHER_KEY)
    theirs.set_alias(path, "borrowed").result(60)
    score(bob, "borrowed")
    rest.unpublish_checkpoint_from_tinker_path(path).result(60)
    refuse(bob, "borrowed")
    assert theirs.list_aliases().result(60) == {}
    assert "borrowed" not in bob.get("/v1/models").text
    theirs.holder.close("success").result(60)
