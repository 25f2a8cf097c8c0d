"""Workers on a Ray cluster: the SDK trains and samples while parts of the cluster are killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.acceptance.processes.test_workers import (
    assert_equal_models,
    make_models,
    train,
)
from tests.support.ray_nodes import ENVIRONMENT, LocalRayCluster
from tests.support.serve_process import ServeProcess, eventually, run_tinkex

#: The shortest time after which models of a lost worker move.
MOVE_SECONDS = "15"


class ClusterServer:
    """`tinkex serve --cluster ray` and the commands of its owner."""

    def __init__(self, serve: Serve, home: Path, store_url: str, cluster: LocalRayCluster) -> None:
        self.store_url = store_url
        flags = ("--store", store_url, "--cluster", "ray", "--ray-address", cluster.address)
        environment = {**ENVIRONMENT, "TINKEX_MOVE_AFTER_SECONDS": MOVE_SECONDS}
        self.process: ServeProcess = serve(home, *flags, "--workers", "2", env=environment)

    def command(self, *words: str) -> list[dict[str, object]]:
        """Run `tinkex cluster ...` and return its JSON output."""
        done = run_tinkex("cluster", *words, "--store", self.store_url, "--json")
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, object]] = json.loads(done.stdout)
        return rows

    def ready_groups(self) -> list[dict[str, object]]:
        return [row for row in self.command("status") if row["state"] == "ready"]

    def wait_for_groups(self, number: int) -> list[dict[str, object]]:
        eventually(lambda: len(self.ready_groups()) == number)
        return self.ready_groups()

    def worker_pids(self) -> list[int]:
        return [int(str(row["pid"])) for row in self.ready_groups() if row["pid"]]


def test_training_goes_on_while_the_cluster_is_killed(
    serve: Serve, home: Path, store_url: str, ray_cluster: LocalRayCluster
) -> None:
    server = ClusterServer(serve, home, store_url, ray_cluster)
    url = server.process.ready()
    server.wait_for_groups(2)
    with tinkex.ServiceClient(base_url=url, api_key=server.process.key) as service:
        undisturbed = train(make_models(service), 8)
        clients = make_models(service)
        losses = train(clients, 2)
        for kill in kills(server, ray_cluster):
            kill()
            losses += train(clients, 2)
    assert_equal_models(losses)
    assert losses == undisturbed


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
