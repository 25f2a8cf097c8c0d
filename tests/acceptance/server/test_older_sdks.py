"""Older official SDKs, unmodified, against a real server: the core of `make compat`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.acceptance.server.scenario_context import BASE_MODEL
from tests.compat.environments import CannotInstall, python_of
from tests.compat.results import ABSENT, FAIL
from tests.compat.sdks import run_scenarios
from tests.compat.servers import place
from tests.support.real_server import RealServer

INSTALLED = "0.36.0"
#: Scenarios that every version must pass.
CORE = [
    "capabilities",
    "create_and_info",
    "forward",
    "learning",
    "many_examples",
    "policy_losses",
    "training_async",
    "load_state",
    "load_state_with_optimizer",
    "from_state",
    "from_state_with_optimizer",
    "sample_base",
    "num_samples",
    "stop",
    "compute_logprobs",
    "prompt_logprobs",
    "saved_weights",
    "ephemeral_weights",
    "parallel",
    "sample_async",
    "training_runs",
    "run_by_path",
    "weights_info",
    "checkpoints",
    "lists_with_external",
    "delete",
    "publish",
    "sessions",
    "sampler_info",
    "rest_async",
    "missing_path",
    "unknown_model",
    "unknown_token",
    "missing_inputs",
    "image",
    "works_on",
    "wrong_key",
]


def python_with(version: str) -> Path:
    """The interpreter of an environment with this SDK; the installed one is our own."""
    if version == INSTALLED:
        return Path(sys.executable)
    try:
        return python_of(f"tinker-{version}", [f"tinker=={version}"])
    except CannotInstall as error:
        pytest.skip(f"tinker {version} cannot be installed: {error}")


@pytest.fixture(scope="module")
def hidden_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Block torch: it is an optional dependency of the SDK and takes seconds to load."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text('raise ImportError("no torch here")\n')
    return folder


@pytest.mark.parametrize(
    ("version", "kind"),
    [("0.12.0", "real_server"), ("0.25.0", "jwt_server"), (INSTALLED, "real_server")],
)
def test_an_sdk_passes_the_core_scenarios(
    version: str, kind: str, hidden_torch: Path, request: pytest.FixtureRequest
) -> None:
    server: RealServer = request.getfixturevalue(kind)
    context = place(server, f"sdk-{version}", BASE_MODEL)
    results = run_scenarios(python_with(version), context, CORE, path=(hidden_torch,))
    assert {each.name for each in results} == {*CORE, "exit"}
    failed = {each.name: each.detail for each in results if each.status == FAIL}
    assert not failed, f"tinker {version}: {failed}"
    absent = {each.name for each in results if each.status == ABSENT}
    assert not absent, f"tinker {version} has all of these: {absent}"
