"""Older official SDKs, unmodified, still work against a real server."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.server import older_sdk
from tests.acceptance.server.places import BASE_MODEL, HELLO, base_logprobs
from tests.acceptance.server.processes import RealServer, clean_environment, run

#: The last whose chunks have no type, the last with a JSON forward pass, the one before
#: `sample_sequence_ids`, one from in between.
VERSIONS = ("0.16.1", "0.24.1", "0.25.0", "0.30.4")


def installed(version: str, cache: Path) -> Path:
    """The folder of an older SDK, which is fetched once; it shares what it needs with ours."""
    folder = cache / version
    if (folder / "tinker").is_dir():
        return folder
    scratch = cache / f"{version}-{os.getpid()}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--target", str(scratch), f"tinker=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"tinker {version} cannot be fetched: {done.stderr.strip()[-300:]}")
    scratch.rename(folder)
    return folder


@pytest.fixture(scope="session")
def hidden_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps torch out: it is an extra of the SDK, and takes seconds to load."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text('raise ImportError("no torch here")\n')
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_sdk_trains_saves_samples_and_fetches(
    server: RealServer, hidden_torch: Path, pytestconfig: pytest.Config, version: str
) -> None:
    folder = installed(version, pytestconfig.cache.mkdir("older-sdks"))
    path = os.pathsep.join(map(str, (folder, hidden_torch)))
    key = server.new_key(f"older-{version}")
    script = [sys.executable, older_sdk.__file__, server.url, key]
    done = run(script, clean_environment(PYTHONPATH=path, PYTHONSAFEPATH="1"))
    check(json.loads(done.stdout), version)


def check(seen: dict[str, Any], version: str) -> None:
    """What every version must see."""
    assert (seen["version"], seen["models"], seen["rank"]) == (version, [BASE_MODEL], 8)
    losses = seen["losses"]
    assert math.isclose(losses[0], -base_logprobs(HELLO).sum(), rel_tol=1e-6)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert seen["is_resumed"]
    assert math.isclose(seen["many"], 9 * seen["async_loss"], rel_tol=1e-6)
    assert seen["shapes"] == [[len(HELLO) - 1]] * 9
    assert math.isclose(-sum(seen["scores"][1:]), seen["async_loss"], rel_tol=1e-4)
    first, second = seen["samples"]
    assert first == second and len(first) == 2
    assert seen["files"]["adapter_model.safetensors"] > 0
    assert {"adapter_config.json", "manifest.json"} <= seen["files"].keys()
    assert seen["model_id"] in seen["runs"] and len(seen["runs"]) == 2
    assert f"tinker://{seen['model_id']}/sampler_weights/best" in seen["checkpoints"]
    assert "no_such_loss" in seen["refusal"]
