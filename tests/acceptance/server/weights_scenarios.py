"""Scenarios of the official SDK: save, load, copy, share and download weights."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request
import warnings
from collections.abc import Callable
from typing import Any

from tests.acceptance.server.scenario_context import (
    BASE_MODEL,
    HELLO,
    ScenarioContext,
    datum,
    loss_of,
    step,
)
from tests.support.real_server import eventually


def connect(place: ScenarioContext, **options: Any) -> Any:
    import tinker

    return tinker.ServiceClient(base_url=place.url, **{"api_key": place.key, **options})


def rest_of(place: ScenarioContext, key: str = "") -> Any:
    import tinker

    return tinker.RestClient(base_url=place.url, api_key=key or place.key)


def is_absent(ask: Callable[[], Any]) -> bool:
    """Whether the server returns 404."""
    import tinker

    try:
        ask()
    except tinker.NotFoundError:
        return True
    return False


def trained(service: Any, num_steps: int = 3) -> Any:
    """A model after a few training steps."""
    import tinker

    client = service.create_lora_training_client(BASE_MODEL, rank=8)
    for _ in range(num_steps):
        step(tinker, client)
    return client


def go_on_from_saved_weights(place: ScenarioContext) -> None:
    """Loading with optimizer state continues identically; without it the optimizer restarts."""
    import tinker

    with connect(place) as service:
        client = trained(service)
        path = client.save_state("third", user_metadata={"why": "test"}).result().path
        assert path == f"tinker://{client.model_id}/weights/third"
        ahead = [step(tinker, client) for _ in range(3)]

        resumed = service.create_training_client_from_state_with_optimizer(path)
        assert resumed.model_id != client.model_id
        assert resumed.get_info().lora_rank == 8
        assert [step(tinker, resumed) for _ in range(3)] == ahead
        fresh = service.create_training_client_from_state(
            path, user_metadata={"from": "third"}, optimizer=tinker.AdamOptimizerConfig()
        )
        loss, metrics = step(tinker, fresh)
        assert loss == ahead[0][0]
        assert metrics["step"] == 1.0

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            client.load_state_with_optimizer(path).result()
            assert [step(tinker, client) for _ in range(3)] == ahead
            client.load_state(path).result()
        loss, metrics = step(tinker, client)
        assert (loss, metrics["step"]) == (ahead[0][0], 1.0)
        asyncio.run(_go_on_async(service, client, path, ahead[0][0]))


async def _go_on_async(service: Any, client: Any, path: str, loss: float) -> None:
    saved = await (await client.save_state_async("fourth"))
    assert saved.path.endswith("/weights/fourth")
    resumed = await service.create_training_client_from_state_with_optimizer_async(path)
    assert await _loss_async(resumed) == loss
    fresh = await service.create_training_client_from_state_async(path)
    assert await _loss_async(fresh) == loss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        await (await client.load_state_async(path))
        assert await _loss_async(client) == loss
        await (await client.load_state_with_optimizer_async(path))
    assert await _loss_async(client) == loss


async def _loss_async(client: Any) -> float:
    import tinker

    passed = await client.forward_async([datum(tinker, HELLO)], "cross_entropy")
    loss: float = (await passed).metrics["loss:sum"]
    return loss


def save_under_a_name_twice(place: ScenarioContext) -> None:
    import tinker

    with connect(place) as service:
        client = trained(service, 1)
        path = client.save_state("best").result().path
        first = loss_of(tinker, client)
        step(tinker, client)
        try:
            client.save_state("best").result()
        except tinker.RequestFailedError as error:
            assert "best" in str(error) and error.category.value == "user", error
        else:
            raise AssertionError("a checkpoint was overwritten unasked")
        restored = service.create_training_client_from_state(path)
        assert loss_of(tinker, restored) == first
        client.save_state("best", overwrite=True).result()
        replaced = service.create_training_client_from_state(path)
        assert loss_of(tinker, replaced) == loss_of(tinker, client) < first
        try:
            client.save_state("no/such name").result()
        except tinker.UnprocessableEntityError as error:
            assert "no/such name" in str(error)
        else:
            raise AssertionError("a name was taken that no path can hold")
        assert loss_of(tinker, client) < first, "the work behind a refused name goes on"


def fetch_files(place: ScenarioContext) -> None:
    from safetensors.numpy import load

    with connect(place) as service:
        client = trained(service)
        saved = client.save_weights_external("export", ttl_seconds=3600).result()
        assert saved.path == f"tinker://{client.model_id}/external_weights/export"
        reply = rest_of(place).get_external_weights_urls(saved.path).result()
        files = {name: fetch(url) for name, url in reply.urls.items()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files.keys()
        assert json.loads(files["adapter_config.json"])["r"] == 8
        assert load(files["adapter_model.safetensors"])
        manifest = json.loads(files["manifest.json"])["files"]
        assert {name: len(files[name]) for name in manifest} == {
            name: entry["size"] for name, entry in manifest.items()
        }
        asyncio.run(_fetch_files_async(place, client))


async def _fetch_files_async(place: ScenarioContext, client: Any) -> None:
    """Encrypted files can be decrypted only with the recipient's key."""
    import pyrage

    identity = pyrage.x25519.Identity.generate()
    pending = await client.save_weights_external_async(
        "sealed", age_encryption_recipients=[str(identity.to_public())]
    )
    path = (await pending).path
    urls = (await rest_of(place).get_external_weights_urls_async(path)).urls
    sealed = await asyncio.to_thread(fetch, urls["adapter_config.json.age"])
    assert [name for name in urls if not name.endswith(".age")] == []
    assert json.loads(pyrage.decrypt(sealed, [identity]))["r"] == 8


def fetch(url: str) -> bytes:
    """GET without a key; the signed URL is sufficient."""
    with urllib.request.urlopen(url, timeout=30) as response:
        content: bytes = response.read()
    return content


def share_weights(place: ScenarioContext) -> None:
    """Another tenant can read a checkpoint only while it is published."""
    import tinker

    rest, stranger = rest_of(place), rest_of(place, place.other_key)
    with connect(place) as service, connect(place, api_key=place.other_key) as foreign:
        client = trained(service)
        path = client.save_state("shared").result().path
        for ask in _asks(stranger, foreign, path):
            assert is_absent(ask)
        rest.publish_checkpoint_from_tinker_path(path).result()
        assert stranger.get_weights_info_by_tinker_path(path).result().lora_rank == 8
        theirs = foreign.create_training_client_from_state(path)
        assert loss_of(tinker, theirs) == loss_of(tinker, client)
        sampler = foreign.create_sampling_client(model_path=path)
        logprobs = sampler.compute_logprobs(tinker.ModelInput.from_ints(HELLO)).result()
        assert math.isclose(-sum(logprobs[1:]), loss_of(tinker, client), rel_tol=1e-5)
        [own] = stranger.list_training_runs().result().training_runs
        assert own.training_run_id == theirs.model_id
        assert is_absent(lambda: stranger.get_training_run(client.model_id).result())
        seen = stranger.get_training_run_by_tinker_path(path, access_scope="accessible").result()
        assert seen.training_run_id == client.model_id
        for change in (
            stranger.delete_checkpoint_from_tinker_path,
            stranger.unpublish_checkpoint_from_tinker_path,
        ):
            assert is_absent(lambda change=change: change(path).result()), "reading is all"
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        for ask in _asks(stranger, foreign, path):
            assert is_absent(ask)
        asyncio.run(_share_async(rest, stranger, path))


def _asks(stranger: Any, foreign: Any, path: str) -> list[Callable[[], Any]]:
    return [
        lambda: stranger.get_weights_info_by_tinker_path(path).result(),
        lambda: stranger.copy_weights(path, "own").result(),
        lambda: foreign.create_sampling_client(model_path=path),
    ]


async def _share_async(rest: Any, stranger: Any, path: str) -> None:
    await rest.publish_checkpoint_from_tinker_path_async(path)
    info = await stranger.get_weights_info_by_tinker_path(path)
    assert (info.base_model, info.is_lora) == (BASE_MODEL, True)
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (True, True, True)
    run = await stranger.get_training_run_by_tinker_path_async(path, access_scope="accessible")
    assert run.base_model == BASE_MODEL
    await rest.unpublish_checkpoint_from_tinker_path_async(path)


def copy_weights(place: ScenarioContext) -> None:
    import tinker

    rest, stranger = rest_of(place), rest_of(place, place.other_key)
    mine, theirs = connect(place, project_id="home"), connect(place, api_key=place.other_key)
    with mine as service, theirs as foreign:
        client = trained(service)
        path = client.save_state("source").result().path
        paths = [
            rest.copy_weights(path, "archive", ttl_seconds=7200).result(),
            service.copy_weights(path).result(),
            asyncio.run(_copy_async(rest, path)),
        ]
        assert len({path, *paths}) == 4
        rest.delete_checkpoint_from_tinker_path(path).result()
        for copy in paths:
            again = service.create_training_client_from_state_with_optimizer(copy)
            assert loss_of(tinker, again) == loss_of(tinker, client)
            run = rest.get_training_run_by_tinker_path(copy).result()
            assert run.last_checkpoint.tinker_path == copy
        listed = {each.tinker_path: each for each in _checkpoints(rest)}
        assert listed[paths[0]].expires_at is not None
        assert listed[paths[2]].expires_at is None
        # With the owner's key, another account can read the source.
        token = {"weights_access_token": place.key}
        taken = stranger.copy_weights(paths[0], "theirs", **token).result()
        assert [each.tinker_path for each in _checkpoints(stranger)] == [taken]
        other = foreign.create_training_client_from_state(paths[0], **token)
        assert loss_of(tinker, other) == loss_of(tinker, client)


async def _copy_async(rest: Any, path: str) -> str:
    copied: str = await rest.copy_weights_async(path, "archive")
    return copied


def _checkpoints(rest: Any) -> list[Any]:
    return list(rest.list_user_checkpoints().result().checkpoints)


def let_weights_expire(place: ScenarioContext) -> None:
    rest = rest_of(place)
    with connect(place) as service:
        client = trained(service, 1)
        short = client.save_state("short", ttl_seconds=1).result().path
        sampler = client.save_weights_for_sampler("brief", ttl_seconds=1).result().path
        kept = client.save_state("kept", ttl_seconds=3600).result().path
        given, forever = (client.save_state(name).result().path for name in ("given", "forever"))
        rest.set_checkpoint_ttl_from_tinker_path(given, 1).result()
        rest.set_checkpoint_ttl_from_tinker_path(kept, None).result()
        asyncio.run(_set_ttl_async(rest, forever))
        eventually(lambda: {each.tinker_path for each in _checkpoints(rest)} == {kept, forever})
        for path in (short, sampler, given):
            assert is_absent(lambda path=path: service.create_sampling_client(model_path=path))
            assert is_absent(lambda path=path: rest.get_weights_info_by_tinker_path(path).result())
        by_path = {each.tinker_path: each for each in _checkpoints(rest)}
        assert by_path[kept].expires_at is None
        assert by_path[forever].expires_at is not None


async def _set_ttl_async(rest: Any, path: str) -> None:
    await rest.set_checkpoint_ttl_from_tinker_path_async(path, 86_400)


def find_no_weights(place: ScenarioContext) -> None:
    """Missing or invalid resources give an immediate error message."""
    import tinker

    with connect(place) as service:
        client = trained(service, 1)
        absent = f"tinker://{client.model_id}/weights/absent"
        assert is_absent(lambda: service.create_training_client_from_state(absent))
        sampler_path = client.save_weights_for_sampler("only").result().path
        try:
            service.create_training_client_from_state(sampler_path)
        except tinker.BadRequestError as error:
            assert "training checkpoint" in str(error)
        else:
            raise AssertionError("weights without an optimizer were trained on")


SCENARIOS = (
    go_on_from_saved_weights,
    save_under_a_name_twice,
    fetch_files,
    share_weights,
    copy_weights,
    let_weights_expire,
    find_no_weights,
)
