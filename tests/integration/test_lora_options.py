"""LoRA options from the SDK to the checkpoint, and nothing new on the wire without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import BASE_MODEL, KEY, TIMEOUT_SECONDS, Connect, Serve, datum
from tinkex import AdamParams, InvalidInput, ServiceClient, TrainingClient
from tinkex.errors import RequestFailedError
from tinkex.testing import StubServer
from tinkex.types import LoraConfig

OPTIONS: dict[str, Any] = {"alpha": 7.5, "use_rslora": True, "target_modules": ["bigram"]}


def created(service: ServiceClient, **options: Any) -> TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=4, seed=3, **options).result(
        TIMEOUT_SECONDS
    )


def saved_config(service: ServiceClient, training: TrainingClient, folder: Path) -> dict[str, Any]:
    """The adapter_config.json of a new checkpoint."""
    path = training.save_weights_for_sampler("x").result(TIMEOUT_SECONDS).path
    rest = service.rest_client()
    rest.download_checkpoint(path, folder).result(TIMEOUT_SECONDS)
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config


def test_requests_without_options_have_only_the_official_fields(
    server: StubServer, connect: Connect
) -> None:
    created(connect(server))
    created(connect(server), alpha=None, target_modules=None)
    for call in server.calls("create_model"):
        assert set(call.message["lora_config"]) == {
            *("rank", "seed", "train_mlp", "train_attn", "train_unembed")
        }


def test_options_reach_the_checkpoint(server: StubServer, connect: Connect, tmp_path: Path) -> None:
    service = connect(server)
    config = saved_config(service, created(service, **OPTIONS), tmp_path / "set")
    assert (config["lora_alpha"], config["use_rslora"]) == (7.5, True)
    assert server.calls("create_model")[-1].message["lora_config"]["alpha"] == 7.5
    config = saved_config(service, created(service), tmp_path / "unset")
    assert (config["lora_alpha"], config["use_rslora"]) == (32, False)


@pytest.mark.parametrize("via_load_weights", [True, False])
def test_a_run_from_a_checkpoint_keeps_the_options(
    serve: Serve, connect: Connect, tmp_path: Path, via_load_weights: bool
) -> None:
    server = serve(client_config={"create_model_via_load_weights": via_load_weights})
    service = connect(server)
    training = created(service, **OPTIONS)
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(AdamParams(learning_rate=0.1)).result(TIMEOUT_SECONDS)
    path = training.save_state("state").result(TIMEOUT_SECONDS).path
    again = service.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_SECONDS)
    config = saved_config(service, again, tmp_path / "again")
    assert (config["lora_alpha"], config["use_rslora"]) == (7.5, True)
    info = service.rest_client().get_weights_info_by_tinker_path(path)
    found = info.result(TIMEOUT_SECONDS)
    assert (found.alpha, found.use_rslora, found.target_modules) == tuple(OPTIONS.values())


def test_unknown_target_module_fails_the_creation(server: StubServer, connect: Connect) -> None:
    with pytest.raises(RequestFailedError, match=r"module 'query' is not .* are: bigram"):
        created(connect(server), target_modules=["query"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"alpha": 0}, "alpha is 0.0; expected more than 0"),
        ({"alpha": float("nan")}, "alpha is nan; expected a finite number"),
        ({"dropout": 0.1}, "dropout is 0.1; LoRA dropout is not supported"),
        ({"target_modules": []}, "target_modules has 0 names; expected 1 to 256"),
        ({"target_modules": [""]}, "target_modules has ''; expected a module's name"),
        ({"target_modules": "q_proj"}, "target_modules is 'q_proj'"),
        ({"lora_alpha": 8}, "no field 'lora_alpha'; did you mean 'alpha'"),
    ],
    ids=str,
)
def test_impossible_options_are_refused_before_a_request(
    server: StubServer, connect: Connect, options: dict[str, Any], reason: str
) -> None:
    service = connect(server)
    with pytest.raises(InvalidInput, match=reason):
        created(service, **options)
    assert not server.calls("create_model")


def test_server_refuses_impossible_options(server: StubServer, connect: Connect) -> None:
    service = connect(server)
    created(service)
    [call] = server.calls("create_model")
    for change, reason in (
        ({"dropout": 0.5}, "LoRA dropout is not supported"),
        ({"alpha": -1}, "expected more than 0"),
    ):
        lora = call.message["lora_config"] | change
        body = call.message | {"model_seq_id": 9, "lora_config": lora}
        reply = httpx.post(
            f"{server.url}/api/v1/create_model", json=body, headers={"x-api-key": KEY}
        )
        assert (reply.status_code, reason in reply.text) == (422, True), reply.text


def test_zero_dropout_is_accepted() -> None:
    assert LoraConfig(rank=4, dropout=0).model_dump()["dropout"] == 0
