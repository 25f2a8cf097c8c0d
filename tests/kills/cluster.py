"""A cluster whose parts can be killed: PostgreSQL, an S3 server, an API server and workers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TypeAlias

from tests.support.ports import free_port
from tests.support.postgres import PostgresServer
from tests.support.ray_nodes import ENVIRONMENT, LocalRayCluster
from tests.support.s3_server import S3Bucket, S3Server
from tinkex.errors import StoreError
from tinkex.store import clusters
from tinkex.store.database import Database

Fault: TypeAlias = Callable[[random.Random], None]

#: Only a limit against hanging.
TIMEOUT_SECONDS = 180.0
KEY = "tml-kills"
MAX_OUTAGE_SECONDS = 3.0
RESTART_SECONDS = 0.5


class Command:
    """A `tinkex` command, started again whenever it ends, as systemd or Kubernetes would."""

    def __init__(self, name: str, words: list[str], env: dict[str, str], logs: Path) -> None:
        self._name, self._words, self._env, self._logs = name, words, env, logs
        self._is_stopped = threading.Event()
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        with (self._logs / f"{self._name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tinkex", *self._words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self._env},
            )

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        if "ready" not in self.process.stdout.readline():
            log = (self._logs / f"{self._name}.log").read_text()
            raise RuntimeError(f"{self._name} did not start: {log[-2000:]}")
        threading.Thread(target=self._restart_when_ended, daemon=True).start()

    def _restart_when_ended(self) -> None:
        """Start the command again: it also ends if the object store is away when it starts."""
        while not self._is_stopped.is_set():
            self.process.wait()
            if not self._is_stopped.wait(RESTART_SECONDS):
                self.process = self._start()

    def kill_children(self) -> None:
        """Kill the processes that this command has started; it restarts them."""
        pid = self.process.pid
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                kill(int(child))

    def kill(self) -> None:
        """Kill the command itself, whose children end with it."""
        self.process.kill()

    def stop(self) -> None:
        self._is_stopped.set()
        self.process.terminate()
        try:
            self.process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


class Cluster:
    """PostgreSQL, S3, a server without workers, and workers with groups and homes of their own."""

    def __init__(self, directory: Path, engine: str, num_workers: int) -> None:
        self._directory, self._engine, self._num_workers = directory, engine, num_workers
        self._port = free_port()
        self._stack = ExitStack()
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def _start_all(self) -> None:
        self.postgres = PostgresServer()
        self._stack.callback(self.postgres.stop)
        self.store = self.postgres.create_database()
        s3 = S3Server()
        self._stack.callback(s3.close)
        self._bucket = self._stack.enter_context(S3Bucket(s3))
        self._env = {
            **self._bucket.environment,
            "TINKEX_STORE": self.store,
            "TINKEX_BLOBS": self._bucket.url,
            "TINKEX_SERVER_API_KEY": KEY,
            "TINKEX_DETERMINISTIC": "true",
            # A job that was running during many kills must not count as failed.
            "TINKEX_MAX_ATTEMPTS": "1000000",
            "TINKEX_MOVE_AFTER_SECONDS": "15",
            "TINKEX_SNAPSHOT_CHANGES": "7",
            "OMP_NUM_THREADS": "1",
        }
        self.start_workers()
        self.server = self.start("serve", "serve", "--port", str(self._port), *self.serve_options())
        self.server.wait_until_ready()

    def start(self, name: str, *words: str) -> Command:
        home = ["--home", str(self._directory / f"home-{name}"), "--engine", self._engine]
        command = Command(name, [*words, *home], self._env, self._directory)
        self._stack.callback(command.stop)
        return command

    def start_workers(self) -> None:
        self._workers = [self.start(f"worker-{n}", "worker") for n in range(self._num_workers)]
        for worker in self._workers:
            worker.wait_until_ready()

    def serve_options(self) -> list[str]:
        return ["--workers", "0"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def faults(self) -> dict[str, tuple[int, Fault]]:
        """What can be killed, with a weight."""
        return {
            "worker": (8, self.kill_worker),
            "node": (1, self.lose_node),
            "api": (5, lambda _: self.server.kill_children()),
            "server": (2, lambda _: self.server.kill()),
            "postgres": (2, lambda _: self.postgres.restart()),
            "s3": (2, self.interrupt_s3),
        }

    def kill_worker(self, rng: random.Random) -> None:
        rng.choice(self._workers).kill_children()

    def lose_node(self, rng: random.Random) -> None:
        """Kill a worker with its supervisor: a new one gets another group, and its models move."""
        rng.choice(self._workers).kill()

    def interrupt_s3(self, rng: random.Random) -> None:
        """Refuse connections to the object store for a while."""
        self._bucket.door.close()
        time.sleep(rng.random() * MAX_OUTAGE_SECONDS)
        self._bucket.door.open()

    def close(self) -> None:
        self._stack.close()


class RayWorkers(Cluster):
    """The same with the workers on a Ray cluster, whose nodes and head can be killed too."""

    def start_workers(self) -> None:
        self._env |= ENVIRONMENT
        # The nodes of a cluster have the credentials of the object store.
        os.environ.update(self._bucket.environment)
        self._ray = LocalRayCluster(self._num_workers)
        self._stack.callback(self._ray.stop)

    def serve_options(self) -> list[str]:
        address = ["--cluster", "ray", "--ray-address", self._ray.address]
        return [*address, "--workers", str(self._num_workers)]

    @property
    def faults(self) -> dict[str, tuple[int, Fault]]:
        return {**super().faults, "node": (2, self.lose_node), "ray head": (1, self.restart_head)}

    def kill_worker(self, rng: random.Random) -> None:
        # The store may be away because of the previous fault.
        with closing(Database(self.store)) as database, suppress(StoreError):
            report = database.read(clusters.read_report)
            pids = [group.pid for group in report.groups if group.pid] if report else []
            if pids:
                kill(rng.choice(pids))

    def lose_node(self, rng: random.Random) -> None:
        """Kill the raylet of a node, and start another node."""
        self._ray.nodes.pop(rng.randrange(len(self._ray.nodes))).kill()
        self._ray.add_nodes(1)

    def restart_head(self, rng: random.Random) -> None:
        """Kill the head, which loses all that Ray knows, and with it all nodes."""
        for node in self._ray.nodes:
            node.kill()
        self._ray.nodes.clear()
        self._ray.restart_head()
        self._ray.add_nodes(self._num_workers)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
