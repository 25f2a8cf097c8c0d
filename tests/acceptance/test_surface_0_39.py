"""The documented surface of SDK 0.39, kept as data: names, parameters, and what methods return."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tinker

import tinkex
from tinkex.testing import StubServer

SURFACE = tomllib.loads((Path(__file__).parent / "data" / "surface_0_39.toml").read_text())
CLIENTS: dict[str, dict[str, dict[str, Any]]] = SURFACE["clients"]
METHODS = [
    pytest.param(getattr(tinkex, client), name, facts, id=f"{client}.{name}")
    for client, methods in CLIENTS.items()
    for name, facts in methods.items()
]


def takes(method: Any) -> list[str]:
    """Return the parameters in the notation of the data."""
    found = []
    for each in inspect.signature(method).parameters.values():
        # Further keywords are options of tinkex servers.
        if each.name == "self" or each.kind is each.VAR_KEYWORD:
            continue
        name = f"*:{each.name}" if each.kind is each.KEYWORD_ONLY else each.name
        has_default = each.default is not each.empty
        found.append(f"{name}={json.dumps(each.default)}" if has_default else name)
    return found


@pytest.mark.parametrize(("client", "name", "facts"), METHODS)
def test_method_is_as_documented(client: type, name: str, facts: dict[str, Any]) -> None:
    method = getattr(client, name)
    found = takes(method)
    # tinkex adds a default; every documented call is possible.
    assert [each.removesuffix('="success"') for each in found] == facts["takes"]
    returned = inspect.signature(method).return_annotation
    if facts["returns"] == "future":
        assert returned.startswith("APIFuture["), f"{name} returns {returned}"
        assert not inspect.iscoroutinefunction(method)
    if facts.get("alias"):
        alias = getattr(client, f"{name}_async")
        assert inspect.iscoroutinefunction(alias)
        assert takes(alias) == found


@pytest.mark.parametrize("name", SURFACE["types"])
def test_type_has_the_documented_fields(name: str) -> None:
    fields = msgspec.inspect.type_info(getattr(tinkex.types, name)).fields  # type: ignore[union-attr]
    assert set(SURFACE["types"][name]) <= {describe_field(field) for field in fields}
    if not hasattr(tinker.types, name):
        assert len(fields) == len(SURFACE["types"][name])


def describe_field(field: msgspec.inspect.Field) -> str:
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is msgspec.NODEFAULT:
        return field.name
    return f"{field.name}={json.dumps(msgspec.to_builtins(default))}"


def test_data_contains_the_installed_package() -> None:
    """0.39 removed nothing that 0.36 has."""
    for client, methods in CLIENTS.items():
        public = {name for name in dir(getattr(tinker, client)) if not name.startswith("_")}
        functions = {name for name in public if callable(getattr(getattr(tinker, client), name))}
        assert {name.removesuffix("_async") for name in functions} - {"result"} <= set(methods)


SYNC_SCRIPT = """
import tinker
from tinker import types

service = tinker.ServiceClient()
models = service.get_server_capabilities().result().supported_models
training = service.create_lora_training_client(models[0].model_name, rank=4).result()
assert type(training) is tinker.TrainingClient
assert training.get_info().result().lora_rank == 4
path = training.save_state("a").result().path
for create in (
    service.create_training_client_from_state,
    service.create_training_client_from_state_with_optimizer,
):
    assert type(create(path).result()) is tinker.TrainingClient
sampler = training.save_weights_and_get_sampling_client().result()
saved = training.save_weights_for_sampler("b").result().path
for future in (
    training.create_sampling_client(saved),
    service.create_sampling_client(model_path=saved),
):
    assert type(future.result(timeout=30)) is tinker.SamplingClient
assert sampler.get_base_model().result() == models[0].model_name
sampled = sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1))
assert sampled.future().result().sequences
service.close("success").result()
print("done")
"""

ASYNC_SCRIPT = """
import asyncio
import tinker
from tinker import types

async def main():
    service = tinker.ServiceClient()
    models = (await service.get_server_capabilities()).supported_models
    name = models[0].model_name
    one, other = await asyncio.gather(
        service.create_lora_training_client(name, rank=4),
        asyncio.create_task(service.create_lora_training_client(name, rank=8).coroutine()),
    )
    assert type(one) is type(other) is tinker.TrainingClient
    assert ((await one.get_info()).lora_rank, (await other.get_info()).lora_rank) == (4, 8)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs=dict(weights=[1.0, 1.0], target_tokens=[2, 3]),
    )
    # Numbered when called: awaiting in reverse order must not matter.
    passed = one.forward_backward([datum], "cross_entropy")
    stepped = one.optim_step(types.AdamParams(learning_rate=0.1))
    assert (await stepped).metrics is not None
    assert (await passed).metrics
    path = (await one.save_state("a")).path
    resumed = await service.create_training_client_from_state_with_optimizer(path)
    sampler = await resumed.save_weights_and_get_sampling_client()
    assert type(sampler) is tinker.SamplingClient
    assert await sampler.get_base_model() == name
    try:
        await service.create_sampling_client(model_path="tinker://nobody/weights/nothing")
    except tinker.NotFoundError:
        await service.close("success")
        print("done")

asyncio.run(main())
"""


@pytest.mark.parametrize("script", [SYNC_SCRIPT, ASYNC_SCRIPT], ids=["sync", "async"])
def test_script_for_0_39_runs(script: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(script)
    with StubServer(api_keys={"tml-parity"}) as server:
        done = run(["-W", "error", "-m", "tinkex.as_tinker", str(file)], server.url)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


DEPRECATED = """
import asyncio, inspect, tinkex

async def main():
    service = tinkex.ServiceClient()
    assert inspect.unwrap(service.create_sampling_client_async)
    sampler = await service.create_sampling_client_async(base_model="tinkex/bigram")
    print(await tinkex.RestClient().list_sessions_async(limit=1))
    await service.close("success")

asyncio.run(main())
"""


@pytest.mark.parametrize("flag", ["0", "1"])
def test_async_names_warn_only_on_request(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(DEPRECATED)
    with StubServer(api_keys={"tml-parity"}) as server:
        done = run([str(file)], server.url, TINKEX_DEPRECATIONS=flag)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "FutureWarning" in line]
    assert [line.split(" ")[0] for line in lines] == (
        [f"{file}:7:", f"{file}:8:"] if flag == "1" else []
    )


def run(arguments: list[str], url: str, **variables: str) -> subprocess.CompletedProcess[str]:
    settings = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-parity", **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
