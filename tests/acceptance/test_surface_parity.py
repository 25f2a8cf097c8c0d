"""Compare the clients with the installed official package: every official call is possible.

Values (`tinker.types`) are compared in test_types_parity.py.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import Parameter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tinker
import tinker.auth
from tinker.lib.retry_handler import RetryConfig as OfficialRetryConfig

import tinkex
from tinkex.testing import StubServer

#: All known differences and their reasons. Each must still accept every official call;
#: a difference that no longer exists must be removed from the list.
ALLOWED = {
    "ServiceClient.__init__": "config= and transport= are added",
    "ServiceClient.close": "status has a default",
    "ServiceClient.create_lora_training_client": "options of tinkex servers are added",
    "ServiceClient.create_lora_training_client_async": "the same",
    "RetryConfig.__init__": "retryable_exceptions names our classes instead of those of httpx",
    "APIError.__init__": "every argument has a default; hint= is added",
    "APIConnectionError.__init__": "every argument has a default; hint= is added",
    "APITimeoutError.__init__": "every argument has a default; message= and hint= are added",
    "APIResponseValidationError.__init__": "every argument has a default",
    "APIStatusError.__init__": "every argument has a default; what the server said is added",
    "RequestFailedError.__init__": "request_id and category have defaults",
}

CLIENTS = (
    "ServiceClient",
    "TrainingClient",
    "SamplingClient",
    "RestClient",
    "AdminClient",
    "APIFuture",
    "LossHandle",
)
ERRORS = tuple(
    name
    for name in tinker.__all__
    if inspect.isclass(value := getattr(tinker, name)) and issubclass(value, BaseException)
)
DUNDERS = ("__init__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__await__")
PAIRS: dict[str, tuple[type, type]] = {
    **{name: (getattr(tinker, name), getattr(tinkex, name)) for name in (*CLIENTS, *ERRORS)},
    "RetryConfig": (OfficialRetryConfig, tinkex.RetryConfig),
}


# --- names -----------------------------------------------------------------------------------


def test_every_official_name_exists() -> None:
    assert [name for name in tinker.__all__ if not hasattr(tinkex, name)] == []
    assert [name for name in tinker.__all__ if name not in tinkex.__all__] == []


def test_dir_lists_importable_names() -> None:
    assert dir(tinkex) == tinkex.__all__
    namespace: dict[str, Any] = {}
    exec("from tinkex import *", namespace)
    assert set(tinkex.__all__) <= namespace.keys()


def test_auth_has_the_same_functions() -> None:
    assert set(tinker.auth.__all__) == set(tinkex.auth.__all__)
    for name in tinker.auth.__all__:
        theirs, ours = getattr(tinker.auth, name), getattr(tinkex.auth, name)
        assert parameters(ours) == parameters(theirs), name
        assert is_async(ours) == is_async(theirs), name


# --- methods, properties and constructors ----------------------------------------------------


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return name, kind and default of each parameter, in order."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def is_async(function: Any) -> bool:
    """Return whether a call must be awaited; unwraps decorators."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def is_property(value: object) -> bool:
    return isinstance(value, property) or type(value).__name__ == "cached_property"


def members(theirs: type) -> Iterator[tuple[str, Any]]:
    """Return the members that the official package defines in a class or its base classes."""
    own = {
        name: value
        for base in reversed(theirs.__mro__)
        if base.__module__.partition(".")[0] == "tinker"
        for name, value in vars(base).items()
    }
    if "__init__" not in vars(theirs):
        own.pop("__init__", None)  # compared in the class that defines it
    for name, value in own.items():
        if name in DUNDERS or not name.startswith("_"):
            yield name, value


def difference(theirs: type, ours: type, name: str, value: Any) -> str | None:
    """Return how one member differs, or None."""
    if not hasattr(ours, name):
        # A dataclass field without a default is not an attribute of the class.
        return None if name in getattr(ours, "__annotations__", {}) else "missing"
    if is_property(value) != is_property(inspect.getattr_static(ours, name)):
        return "a property on one side only"
    one, other = getattr(theirs, name), getattr(ours, name)
    if not callable(one):
        return None
    if is_async(one) != is_async(other):
        return f"async is {is_async(one)} there and {is_async(other)} here"
    if parameters(one) != parameters(other):
        return f"takes {parameters(one)} there and {parameters(other)} here"
    return None


def lost_bases(theirs: type, ours: type) -> list[str]:
    """Return builtin base classes that only one of the two classes has."""
    builtins = [base for base in theirs.__mro__ if base.__module__ == "builtins"]
    return [base.__name__ for base in builtins if not issubclass(ours, base)]


def all_differences() -> dict[str, str]:
    found: dict[str, str] = {}
    for class_name, (theirs, ours) in PAIRS.items():
        if lost := lost_bases(theirs, ours):
            found[f"{class_name}.bases"] = f"not a {', '.join(lost)}"
        for name, value in members(theirs):
            if (text := difference(theirs, ours, name, value)) is not None:
                found[f"{class_name}.{name}"] = text
    return found


def test_members_match_except_allowed_differences() -> None:
    found = all_differences()
    unexpected = {name: text for name, text in found.items() if name not in ALLOWED}
    assert unexpected == {}
    unused = ALLOWED.keys() - found.keys()
    assert unused == set(), "these no longer differ"


@pytest.mark.parametrize("name", [name for name in ALLOWED if not name.endswith(".bases")])
def test_allowed_differences_accept_every_official_call(name: str) -> None:
    class_name, _, member = name.partition(".")
    theirs, ours = (inspect.signature(getattr(each, member)) for each in PAIRS[class_name])
    assert positional(ours)[: len(positional(theirs))] == positional(theirs)
    for parameter in theirs.parameters.values():
        same = ours.parameters[parameter.name]
        assert same.kind == parameter.kind
        if parameter.name != "retryable_exceptions" and parameter.default is not Parameter.empty:
            assert same.default == parameter.default
    added = [each for each in ours.parameters.values() if each.name not in theirs.parameters]
    optional = [each for each in added if each.kind is not Parameter.VAR_KEYWORD]
    assert all(each.default is not Parameter.empty for each in optional)


def positional(signature: inspect.Signature) -> list[str]:
    kind = Parameter.POSITIONAL_OR_KEYWORD
    return [each.name for each in signature.parameters.values() if each.kind is kind]


def test_comparison_covers_expected_members() -> None:
    """Guards against a comparison that passes because it compares nothing."""
    seen = {
        f"{name}.{member}" for name, (theirs, _) in PAIRS.items() for member, _ in members(theirs)
    }
    assert len(seen) > 120
    assert {
        "ServiceClient.create_lora_training_client_async",
        "ServiceClient.holder",
        "ServiceClient.__enter__",
        "TrainingClient.forward_backward_custom",
        "SamplingClient.from_sampler_handle",
        "RestClient.search_sessions_async",
        "AdminClient.get_audit_log",
        "APIFuture.__await__",
        "LossHandle.key",
    } <= seen


# --- errors ----------------------------------------------------------------------------------


def test_except_clauses_catch_same_errors() -> None:
    for one in ERRORS:
        for other in ERRORS:
            if issubclass(getattr(tinker, one), getattr(tinker, other)):
                assert issubclass(getattr(tinkex, one), getattr(tinkex, other)), (one, other)


def test_errors_have_same_constructor_and_attributes() -> None:
    request = SimpleNamespace(method="POST", url="http://host/api/v1/optim_step")
    response = SimpleNamespace(status_code=429, request=request)
    for package in (tinker, tinkex):
        status = package.RateLimitError("slow down", response=response, body={"detail": "no"})
        assert (status.message, status.status_code) == ("slow down", 429)
        assert (status.body, status.response, status.request) == (
            {"detail": "no"},
            response,
            request,
        )
        lost = package.APIConnectionError(request=request)
        assert (str(lost), lost.request, lost.body) == ("Connection error.", request, None)
        assert str(package.APITimeoutError(request)) == "Request timed out."
        bad = package.APIResponseValidationError(response, None)
        assert str(bad) == "Data returned by API invalid for expected schema."
        category = package.types.RequestErrorCategory.User
        failed = package.RequestFailedError("bad loss", "req-1", category)
        assert (str(failed), failed.request_id, failed.category) == ("bad loss", "req-1", "user")


# --- a script for the official package -------------------------------------------------------

SYNC_SCRIPT = """
import json
import tinker
from tinker import types

HELLO = list(b"hello hello hello hello")

def make_datum(tokens):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs=dict(weights=[1.0] * (len(tokens) - 1), target_tokens=tokens[1:]),
    )

report = {}
with tinker.ServiceClient(user_metadata={"purpose": "parity"}, display_name="parity") as service:
    models = [item.model_name for item in service.get_server_capabilities().supported_models]
    training = service.create_lora_training_client(base_model=models[0], rank=16, seed=3)
    report["rank"] = training.get_info().lora_rank
    losses = []
    for step in range(8):
        fwdbwd_future = training.forward_backward([make_datum(HELLO)] * 3, "cross_entropy")
        optim_future = training.optim_step(types.AdamParams(learning_rate=0.2, beta2=0.98))
        fwdbwd_result = fwdbwd_future.result()
        optim_future.result()
        losses.append(round(fwdbwd_result.metrics["loss:sum"], 3))
    report["losses"] = losses
    report["logprobs"] = len(fwdbwd_result.loss_fn_outputs[0]["logprobs"].tolist())
    saved = training.save_state(name="step-8").result()
    report["checkpoint"] = saved.path.partition("/weights/")[2]
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=12, temperature=0.7, seed=5, stop=["x"])
    prompt = types.ModelInput.from_ints(HELLO[:3])
    sampled = sampler.sample(prompt=prompt, sampling_params=params, num_samples=2).result()
    report["tokens"] = [sequence.tokens for sequence in sampled.sequences]
    report["scores"] = [round(score, 3) for score in sampler.compute_logprobs(prompt).result()[1:]]
    resumed = service.create_training_client_from_state_with_optimizer(saved.path)
    again = resumed.forward([make_datum(HELLO)], "cross_entropy").result()
    report["resumed"] = round(again.metrics["loss:sum"], 3)
    rest = tinker.RestClient()
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    report["listed"] = sorted(item.checkpoint_type for item in listed)
    try:
        service.create_sampling_client(model_path="tinker://nobody/weights/nothing")
    except tinker.NotFoundError as error:
        report["missing"] = error.status_code
print(json.dumps(report))
"""

ASYNC_SCRIPT = """
import asyncio
import json
import numpy as np
import tinker

PROMPT = tinker.ModelInput.from_ints(list(b"ab"))

def rewarded(sequence, logprobs, reward):
    tokens = list(PROMPT.to_ints()) + list(sequence)
    padding = [0.0] * (len(PROMPT.to_ints()) - 1)
    advantages = padding + [reward] * len(sequence)
    floats = lambda numbers: tinker.TensorData.from_numpy(np.array(numbers, dtype=np.float32))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:])),
            "logprobs": floats(padding + list(logprobs)),
            "advantages": floats(advantages),
        },
    )

async def main():
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client_async("tinkex/bigram", rank=8)
    rewards = []
    for step in range(4):
        sampler = await training.save_weights_and_get_sampling_client_async()
        params = tinker.SamplingParams(max_tokens=8, temperature=1.0, seed=step)
        answers = await asyncio.gather(
            *[sampler.sample_async(PROMPT, num_samples=4, sampling_params=params) for _ in range(3)]
        )
        sequences = [sequence for answer in answers for sequence in answer.sequences]
        gains = [sum(token < 128 for token in s.tokens) / len(s.tokens) for s in sequences]
        mean = sum(gains) / len(gains)
        data = [rewarded(s.tokens, s.logprobs, g - mean) for s, g in zip(sequences, gains)]
        fwdbwd = await training.forward_backward_async(data, loss_fn="importance_sampling")
        optim = await training.optim_step_async(tinker.AdamParams(learning_rate=0.3))
        output = await fwdbwd.result_async()
        await optim
        rewards.append(round(mean, 3))
    saved = await training.save_weights_for_sampler_async(name="final")
    path = (await saved).path
    fresh = await service.create_sampling_client_async(model_path=path)
    scores = await fresh.compute_logprobs_async(PROMPT)
    outputs = len(output.loss_fn_outputs)
    await service.close("success")
    print(json.dumps({"rewards": rewards, "scores": [round(scores[1], 3)], "outputs": outputs}))

asyncio.run(main())
"""


def run_official(script: str, url: str) -> dict[str, Any]:
    """Run in a separate process: the official SDK leaves sockets open."""
    changes = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-parity", "TINKER_TELEMETRY": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | changes,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_ours(
    script: str, url: str, monkeypatch: pytest.MonkeyPatch, printed: Callable[[], str]
) -> dict[str, Any]:
    """Run the same script with tinkex in place of `tinker`."""
    monkeypatch.setitem(sys.modules, "tinker", tinkex)
    monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-parity")
    alias = ModuleType("script")
    exec(compile(script, "script.py", "exec"), alias.__dict__)
    assert alias.__dict__["tinker"] is tinkex
    found: dict[str, Any] = json.loads(printed().splitlines()[-1])
    return found


@pytest.mark.parametrize("script", [SYNC_SCRIPT, ASYNC_SCRIPT], ids=["sync", "async"])
def test_script_for_official_package_runs_unchanged(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with StubServer(api_keys={"tml-parity"}) as server:
        expected = run_official(script, server.url)
    with StubServer(api_keys={"tml-parity"}) as server:
        found = run_ours(script, server.url, monkeypatch, lambda: capsys.readouterr().out)
        assert list(server.finish_reasons.values()) == ["success"]
    assert found == expected
