"""Workers on a Ray cluster: the SDK trains and samples while parts of the cluster are killed."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.acceptance.processes.test_workers import assert_equal_models, make_models, train
from tests.support.ray_nodes import ENVIRONMENT, LocalRayCluster
from tests.support.serve_process import TIMEOUT_SECONDS, ServeProcess, eventually, run_tinkex

#: The shortest time after which models of a lost worker move.
MOVE_SECONDS = "15"


class ClusterServer:
    """`tinkex serve --cluster ray` and the commands of its owner."""

    def __init__(
        self,
        serve: Serve,
        home: Path,
        store_url: str,
        cluster: LocalRayCluster,
        *flags: str,
        env: dict[str, str] | None = None,
    ) -> None:
        self.store_url = store_url
        words = ("--store", store_url, "--cluster", "ray", "--ray-address", cluster.address)
        environment = {**ENVIRONMENT, "TINKEX_MOVE_AFTER_SECONDS": MOVE_SECONDS, **(env or {})}
        self.process: ServeProcess = serve(home, *words, *flags, env=environment)

    def command(self, *words: str) -> Any:
        """Run `tinkex cluster ...` and return its JSON output."""
        done = run_tinkex("cluster", *words, "--store", self.store_url, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def ready_groups(self) -> list[dict[str, Any]]:
        return [row for row in self.command("status") if row["state"] == "ready"]

    def wait_for_groups(self, number: int) -> list[dict[str, Any]]:
        eventually(lambda: len(self.ready_groups()) == number)
        return self.ready_groups()

    def stop_groups(self) -> None:
        """Free the resources of the cluster for other servers."""
        self.command("down")
        eventually(lambda: all(not node["groups"] for node in self.command("nodes")))

    def worker_pids(self) -> list[int]:
        eventually(lambda: all(row["pid"] for row in self.ready_groups()))
        return [row["pid"] for row in self.ready_groups()]


def sample(service: tinkex.ServiceClient, client: tinkex.TrainingClient) -> list[int]:
    sampler = client.save_weights_and_get_sampling_client()
    params = tinkex.SamplingParams(max_tokens=6, seed=1)
    future = sampler.sample(tinkex.ModelInput.from_ints([3, 4, 5]), 1, params)
    return list(future.result(TIMEOUT_SECONDS).sequences[0].tokens)


def test_training_goes_on_while_the_cluster_is_killed(
    serve: Serve, home: Path, store_url: str, ray_cluster: LocalRayCluster
) -> None:
    server = ClusterServer(serve, home, store_url, ray_cluster, "--workers", "2")
    url = server.process.ready()
    server.wait_for_groups(2)
    with tinkex.ServiceClient(base_url=url, api_key=server.process.key) as service:
        models = make_models(service)
        undisturbed = train(models, 8)
        sampled = sample(service, models[0])
        clients = make_models(service)
        losses = train(clients, 2)
        for kill in kills(server, ray_cluster):
            kill()
            losses += train(clients, 2)
        assert sample(service, clients[0]) == sampled
    assert_equal_models(losses)
    assert losses == undisturbed
    run_commands(server, url)


def kills(server: ClusterServer, cluster: LocalRayCluster) -> list[Callable[[], None]]:
    def kill_worker() -> None:
        os.kill(server.worker_pids()[0], signal.SIGKILL)

    def kill_node() -> None:
        cluster.nodes.pop().kill()
        cluster.add_nodes(1)

    def kill_head() -> None:
        for node in cluster.nodes:
            node.kill()
        cluster.nodes.clear()
        cluster.restart_head()
        cluster.add_nodes(2)

    return [kill_worker, kill_node, kill_head]


def run_commands(server: ClusterServer, url: str) -> None:
    """The owner looks at the cluster, drains a group, and stops all."""
    first, second = server.wait_for_groups(2)
    nodes = server.command("nodes")
    assert sorted(name for node in nodes for name in node["groups"]) == [
        first["group"],
        second["group"],
    ]
    with urllib.request.urlopen(f"{url}/cluster") as response:
        page = response.read().decode()
    assert first["group"] in page
    assert nodes[0]["node"][:12] in page
    with urllib.request.urlopen(f"{url}/metrics") as response:
        metrics = response.read().decode()
    assert f'tinkex_group_restarts{{group="{first["group"]}"}}' in metrics
    drained = server.command("drain", first["group"])
    assert drained["group"] == first["group"]
    # Another one takes its place.
    eventually(lambda: len(server.ready_groups()) == 2)
    assert first["group"] not in {row["group"] for row in server.ready_groups()}
    assert server.command("scale", "default", "2", "3") == {"pool": "default", "min": 2, "max": 3}
    missing = run_tinkex("cluster", "scale", "other", "1", "--store", server.store_url)
    assert missing.returncode == 1
    assert "pool 'other' does not exist; there is default" in missing.stderr
    server.stop_groups()


def test_unusable_clusters_are_refused_with_a_sentence(
    home: Path, store_url: str, ray_cluster: LocalRayCluster, tmp_path: Path
) -> None:
    def refusal(address: str, **env: str) -> str:
        words = ["serve", "--home", str(home), "--port", "0", "--store", store_url]
        done = run_tinkex(
            *words, "--cluster", "ray", "--ray-address", address, env={**ENVIRONMENT, **env}
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "there is no Ray cluster at '127.0.0.1:9'" in refusal("127.0.0.1:9")
    assert "ray_address is 'nowhere'; expected HOST:PORT or auto" in refusal("nowhere")
    sqlite = run_tinkex("serve", "--home", str(home), "--cluster", "ray")
    assert sqlite.returncode == 1
    assert "need a PostgreSQL store, but the store is SQLite" in sqlite.stderr
    # A node with another version: this one claims to have it.
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.1.0'\n")
    assert "has other versions (Ray 2." in refusal(ray_cluster.address, PYTHONPATH=str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    missing = refusal(ray_cluster.address, PYTHONPATH=str(tmp_path))
    assert "needs Ray, which is not installed; run " in missing
