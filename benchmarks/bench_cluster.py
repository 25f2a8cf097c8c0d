"""Workers on a Ray cluster: their overhead, and the pause of a client when a node is lost.

A worker that `tinkex worker` starts and one that Ray starts are measured in turn, with one thread
each, on the same PostgreSQL server. Ray has a head and one or two nodes on this machine. `--quick`
measures one round.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from benchmarks import Row, at_least, at_most
from benchmarks.bench_groups import measure_rate
from benchmarks.engine.ours import MODEL
from benchmarks.engine.serving import serve
from benchmarks.engine.shapes import SMALL, write_model
from tests.acceptance.processes.test_workers import datum
from tests.support.postgres import PostgresServer
from tests.support.ray_nodes import ENVIRONMENT, LocalRayCluster
from tests.support.serve_process import ServeProcess
from tinkex import AdamParams, ServiceClient, TrainingClient

NUM_ROUNDS = 3
MOVE_SECONDS = 15.0
TIMEOUT_SECONDS = 180.0


@contextmanager
def _serve_with_worker(folder: Path, store: str) -> Iterator[ServiceClient]:
    """Run a server and a worker of its own, without Ray."""
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        settings = {"TINKEX_STORE": store, "TINKEX_WORKERS": "0", "TINKEX_THREADS": "1"}
        words = ["--home", home, "--store", store, "--threads", "1", "--engine", "local"]
        worker = subprocess.Popen(
            [sys.executable, "-m", "tinkex", "worker", *words, "--model", f"{MODEL}={folder}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(worker.communicate, timeout=TIMEOUT_SECONDS)
        stack.callback(worker.terminate)
        assert worker.stdout is not None
        assert "ready" in worker.stdout.readline()
        yield stack.enter_context(serve(folder, **settings))


@contextmanager
def _serve_on_ray(folder: Path, store: str) -> Iterator[ServiceClient]:
    """Run a server with a worker on Ray."""
    cluster = LocalRayCluster(num_nodes=1)
    try:
        settings = {"TINKEX_STORE": store, "TINKEX_RAY_ADDRESS": cluster.address}
        settings |= {"TINKEX_CLUSTER": "ray", "TINKEX_THREADS": "1", **ENVIRONMENT}
        with serve(folder, **settings) as service:
            try:
                yield service
            finally:
                # The worker writes to the home, which ends with the server.
                cluster.stop()
    finally:
        cluster.stop()


def measure_overhead(num_rounds: int) -> Row:
    """Compare a worker on Ray with the same worker without Ray."""
    rates: dict[str, list[float]] = {"plain": [], "ray": []}
    with ExitStack() as stack:
        folder = write_model(SMALL, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "m")
        postgres = PostgresServer()
        stack.callback(postgres.stop)
        sides = {"plain": _serve_with_worker, "ray": _serve_on_ray}
        for side in [*rates] * num_rounds:
            with sides[side](folder, postgres.create_database()) as service:
                rates[side].append(asyncio.run(measure_rate(service)))
    return at_least(
        "a worker on Ray : without Ray",
        median(rates["ray"]),
        median(rates["plain"]),
        "tokens/s",
        0.97,
    )


def measure_lost_node() -> Row:
    """Measure the longest step of a client while the node of its model is lost."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = PostgresServer()
        stack.callback(postgres.stop)
        cluster = LocalRayCluster(num_nodes=2)
        stack.callback(cluster.stop)
        flags = ["--store", postgres.create_database(), "--cluster", "ray", "--workers", "2"]
        server = ServeProcess(
            directory / "home",
            *[*flags, "--ray-address", cluster.address, "--engine", "fake"],
            env={**ENVIRONMENT, "TINKEX_MOVE_AFTER_SECONDS": f"{MOVE_SECONDS:g}"},
        )
        stack.callback(server.end)
        service = stack.enter_context(ServiceClient(base_url=server.ready(), api_key=server.key))
        clients = [service.create_lora_training_client("tinkex/bigram", rank=4) for _ in range(8)]
        _step(clients)
        cluster.nodes.pop().kill()
        seconds = [_step(clients) for _ in range(3)]
    return at_most("pause when a node is lost : time to move", max(seconds), MOVE_SECONDS, "s")


def _step(clients: Sequence[TrainingClient]) -> float:
    """Train all models one step; return the seconds."""
    started = time.monotonic()
    for client in clients:
        client.forward_backward([datum()], "cross_entropy")
    for future in [client.optim_step(AdamParams(learning_rate=0.1)) for client in clients]:
        future.result(TIMEOUT_SECONDS)
    return time.monotonic() - started


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks cluster", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure one round")
    asked = parser.parse_args(list(options))
    return [measure_lost_node(), measure_overhead(1 if asked.quick else NUM_ROUNDS)]
