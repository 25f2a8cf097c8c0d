"""PyTorch, several ranks, and the official SDK on a Ray cluster whose nodes are killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tinker

import tinkex
from tests.acceptance.cluster.test_ray import ClusterServer
from tests.acceptance.processes.conftest import Serve
from tests.support.ray_nodes import LocalRayCluster
from tests.support.serve_process import TIMEOUT_SECONDS

NUM_STEPS = 2


def train(sdk: ModuleType, client: Any, num_steps: int) -> list[float]:
    """Train a model and return its losses."""
    types = sdk.types
    tokens = [3, 5, 8, 13, 21, 34, 55, 89, 3]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 8},
    )
    losses = []
    for _ in range(num_steps):
        passed = client.forward_backward([datum] * 4, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.01)).result(TIMEOUT_SECONDS)
        losses.append(passed.result(TIMEOUT_SECONDS).metrics["loss:sum"])
    return losses


def sample(sdk: ModuleType, client: Any) -> list[int]:
    types = sdk.types
    sampler = client.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=6, seed=1, temperature=1.0)
    future = sampler.sample(types.ModelInput.from_ints([3, 4, 5]), 1, params)
    return list(future.result(TIMEOUT_SECONDS).sequences[0].tokens)


@pytest.mark.slow
# The official SDK leaves its connections open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("sdk", "engine", "model", "ranks"),
    [
        pytest.param(tinker, "fake", "tinkex/bigram", 1, id="official-sdk"),
        pytest.param(tinkex, "local", "tinkex/tiny", 1, id="pytorch"),
        pytest.param(tinkex, "local", "tinkex/tiny", 2, id="two-ranks"),
    ],
)
def test_results_are_equal_after_kills(
    serve: Serve,
    home: Path,
    store_url: str,
    ray_cluster: LocalRayCluster,
    sdk: ModuleType,
    engine: str,
    model: str,
    ranks: int,
) -> None:
    pool = {"name": "train", "ranks": ranks, "resources": {"CPU": 1}, "min": 3 - ranks}
    env = {
        "TINKEX_ENGINE": engine,
        "TINKEX_DETERMINISTIC": "1",
        "TINKEX_POOLS": json.dumps([pool]),
    }
    server = ClusterServer(serve, home, store_url, ray_cluster, env=env)
    url = server.process.ready()
    server.wait_for_groups(3 - ranks)
    service = sdk.ServiceClient(base_url=url, api_key=server.process.key)
    calm = service.create_lora_training_client(model, rank=4, seed=1)
    undisturbed = train(sdk, calm, 3 * NUM_STEPS), sample(sdk, calm)
    client = service.create_lora_training_client(model, rank=4, seed=1)
    losses = train(sdk, client, NUM_STEPS)
    for pid in server.worker_pids():
        os.kill(pid, signal.SIGKILL)
    losses += train(sdk, client, NUM_STEPS)
    ray_cluster.nodes.pop(0).kill()
    ray_cluster.add_nodes(1)
    losses += train(sdk, client, NUM_STEPS)
    assert (losses, sample(sdk, client)) == undisturbed
    assert losses[-1] < losses[0]
    server.stop_groups()
