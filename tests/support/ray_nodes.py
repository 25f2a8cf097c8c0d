"""Nodes of a Ray cluster on loopback, each started by a process of its own.

python -m tests.support.ray_nodes PORT NUM_CPUS FILE [head]
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.serve_process import eventually
from tinkex.system.atomic import write_file_atomic

HOST = "127.0.0.1"
_START_SECONDS = 120.0
_STOP_SECONDS = 20.0
_OBJECT_STORE_BYTES = 80 * 2**20
#: Nodes are noticed as lost within 2 seconds; without a head they end after 3 seconds.
_SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "gcs_rpc_server_reconnect_timeout_s": 3,
    "enable_metrics_collection": False,
}
ENVIRONMENT = {
    # Otherwise Ray replaces 127.0.0.1 by the address of another interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayNode:
    """A node that can be killed like a machine that is lost."""

    def __init__(self, port: int, num_cpus: int, directory: Path, *, is_head: bool = False) -> None:
        started = directory / f"node-{time.monotonic_ns()}.json"
        words = [str(port), str(num_cpus), str(started), *(["head"] if is_head else [])]
        # Not a pipe: processes of Ray would keep it open.
        with (directory / "nodes.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.ray_nodes", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT},
                process_group=0,
            )
        eventually(
            lambda: started.exists() or self._process.poll() is not None, seconds=_START_SECONDS
        )
        assert started.exists(), (directory / "nodes.log").read_text()[-2000:]
        self.pids: dict[str, list[int]] = json.loads(started.read_text())

    def kill(self) -> None:
        """Kill Ray on the node: the control store, if it is the head, and the raylet."""
        for name in ("gcs_server", "raylet"):
            for pid in self.pids.get(name, []):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """End all processes of the node."""
        self._process.terminate()
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LocalRayCluster:
    """A head without resources for groups, and nodes that can be added and killed."""

    def __init__(self, num_nodes: int, num_cpus: int = 1) -> None:
        self._num_cpus = num_cpus
        self.port = free_port()
        # Sockets have short paths.
        self._directory = Path(tempfile.mkdtemp(prefix="tkx-ray-"))
        self.nodes: list[RayNode] = []
        self.head = self._start_head()
        try:
            self.add_nodes(num_nodes)
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def _start_head(self) -> RayNode:
        return RayNode(self.port, 0, self._directory, is_head=True)

    def add_nodes(self, number: int) -> None:
        # One after the other: two that start at once choose the same names for their sockets.
        for _ in range(number):
            self.nodes.append(RayNode(self.port, self._num_cpus, self._directory))

    def restart_head(self) -> None:
        """Kill the head, which loses all that Ray knows, and start another one."""
        self.head.kill()
        self.head = self._start_head()

    def stop(self) -> None:
        for node in [*self.nodes, self.head]:
            node.stop()
        shutil.rmtree(self._directory, ignore_errors=True)


def _run_node(port: int, num_cpus: int, started: Path, *, is_head: bool) -> None:
    import ray._private.node
    from ray._private.parameter import RayParams

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    options: dict[str, Any] = {"_system_config": _SYSTEM_CONFIG} if is_head else {}
    params = RayParams(
        gcs_address=None if is_head else f"{HOST}:{port}",
        node_ip_address=HOST,
        gcs_server_port=port if is_head else None,
        num_cpus=num_cpus,
        num_gpus=0,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        temp_dir=str(started.parent) if is_head else None,
        **options,
    )
    node = ray._private.node.Node(params, head=is_head, shutdown_at_exit=False, spawn_reaper=False)
    try:
        pids = {
            name: [each.process.pid for each in processes]
            for name, processes in node.all_processes.items()
        }
        write_file_atomic(started, json.dumps(pids).encode())
        signal.pause()
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    _run_node(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), is_head="head" in sys.argv)
