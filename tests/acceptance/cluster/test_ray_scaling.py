"""Pools of a Ray cluster: scaled by their queues, stopped and started, replaced one by one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import tinkex
from tests.acceptance.cluster.test_ray import ClusterServer
from tests.acceptance.processes.conftest import Serve
from tests.acceptance.processes.test_workers import (
    assert_equal_models,
    datum,
    make_models,
    train,
)
from tests.support.ray_nodes import LocalRayCluster
from tests.support.serve_process import TIMEOUT_SECONDS, eventually

#: Work that takes one group about a minute: each operation of the fake engine takes this long.
OPERATION_SECONDS = 0.2
NUM_AHEAD = 80


def pool_environment(*, smallest: int, largest: int, seconds: float) -> dict[str, str]:
    pool = {"name": "train", "resources": {"CPU": 1}, "min": smallest, "max": largest}
    return {"TINKEX_POOLS": json.dumps([pool]), "TINKEX_FAKE_SECONDS": str(seconds)}


def submit_steps(clients: list[tinkex.TrainingClient], number: int) -> list[list[float]]:
    """Submit all steps ahead, then wait for them; returns the losses by step."""
    params = tinkex.AdamParams(learning_rate=0.1)
    steps = [
        [
            (client.forward_backward([datum()], "cross_entropy"), client.optim_step(params))
            for client in clients
        ]
        for _ in range(number)
    ]
    losses = []
    for step in steps:
        losses.append([one.result(TIMEOUT_SECONDS).metrics["loss:sum"] for one, _ in step])
        for _, optim in step:
            optim.result(TIMEOUT_SECONDS)
    return losses


@pytest.mark.slow
def test_pool_grows_with_its_queue(
    serve: Serve, home: Path, store_url: str, ray_cluster: LocalRayCluster
) -> None:
    env = pool_environment(smallest=1, largest=2, seconds=OPERATION_SECONDS)
    server = ClusterServer(serve, home, store_url, ray_cluster, env=env)
    url = server.process.ready()
    server.wait_for_groups(1)
    with tinkex.ServiceClient(base_url=url, api_key=server.process.key) as service:
        clients = make_models(service)
        losses = submit_steps(clients, NUM_AHEAD)
        assert len(server.ready_groups()) == 2
    assert_equal_models(losses)
    server.stop_groups()


@pytest.mark.slow
def test_models_go_on_after_down_and_up(
    serve: Serve, home: Path, store_url: str, ray_cluster: LocalRayCluster
) -> None:
    env = pool_environment(smallest=2, largest=2, seconds=0.0)
    server = ClusterServer(serve, home, store_url, ray_cluster, env=env)
    url = server.process.ready()
    server.wait_for_groups(2)
    with tinkex.ServiceClient(base_url=url, api_key=server.process.key) as service:
        undisturbed = train(make_models(service), 4)
        clients = make_models(service)
        losses = train(clients, 2)
        server.stop_groups()
        assert [row["state"] for row in server.command("status")] == ["stopped"] * 2
        server.command("up")
        server.wait_for_groups(2)
        losses += train(clients, 2)
    assert losses == undisturbed
    server.stop_groups()


@pytest.mark.slow
def test_groups_with_other_settings_are_replaced(
    serve: Serve, home: Path, store_url: str, ray_cluster: LocalRayCluster
) -> None:
    env = pool_environment(smallest=2, largest=2, seconds=0.0)
    first = ClusterServer(serve, home, store_url, ray_cluster, env=env)
    url = first.process.ready()
    before = {row["group"] for row in first.wait_for_groups(2)}
    with tinkex.ServiceClient(base_url=url, api_key=first.process.key) as service:
        undisturbed = train(make_models(service), 2)
    first.process.send(signal.SIGTERM)
    first.process.process.wait(TIMEOUT_SECONDS)
    changed = pool_environment(smallest=2, largest=2, seconds=0.001)
    second = ClusterServer(serve, home, store_url, ray_cluster, env=changed)
    url = second.process.ready()
    with tinkex.ServiceClient(base_url=url, api_key=second.process.key) as service:
        # Trained while the groups are replaced.
        losses = train(make_models(service), 2)
        assert losses == undisturbed
        wait_for_other_groups(second, before)
        assert train(make_models(service), 2) == undisturbed
    second.stop_groups()


def wait_for_other_groups(server: ClusterServer, before: set[str]) -> None:
    def is_replaced() -> bool:
        names = {row["group"] for row in server.ready_groups()}
        return len(names) == 2 and not names & before

    eventually(is_replaced, seconds=120.0)
