"""A cluster whose parts can be killed: PostgreSQL, an S3 server, an API server and workers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support.ports import free_port
from tests.support.postgres import PostgresServer
from tests.support.s3_server import S3Bucket, S3Server

#: Only a limit against hanging.
TIMEOUT_SECONDS = 180.0
KEY = "tml-kills"
MAX_OUTAGE_SECONDS = 3.0


class Command:
    """A `tinkex` command that prints a line when it is ready; restarted after it was killed."""

    def __init__(self, name: str, words: list[str], env: dict[str, str], logs: Path) -> None:
        self._name, self._words, self._env, self._logs = name, words, env, logs
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

    def kill_children(self) -> None:
        """Kill the processes that this command has started; it restarts them."""
        pid = self.process.pid
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)

    def kill(self) -> None:
        """Kill the command itself, whose children end with it, and start it again."""
        self.process.kill()
        self.process.communicate()
        self.process = self._start()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


class Cluster:
    """PostgreSQL, S3, a server without workers, and workers with groups and homes of their own."""

    def __init__(self, directory: Path, engine: str, num_workers: int) -> None:
        self.directory = directory
        self.workers: list[Command] = []
        self.postgres = PostgresServer()
        self.store = self.postgres.create_database()
        self.s3 = S3Server()
        self.bucket = S3Bucket(self.s3)
        self.port = free_port()
        env = {
            **self.bucket.environment,
            "TINKEX_STORE": self.store,
            "TINKEX_BLOBS": self.bucket.url,
            "TINKEX_SERVER_API_KEY": KEY,
            "TINKEX_DETERMINISTIC": "true",
            # A job that was running during many kills must not count as failed.
            "TINKEX_MAX_ATTEMPTS": "1000000",
            "TINKEX_MOVE_AFTER_SECONDS": "15",
            "TINKEX_SNAPSHOT_CHANGES": "7",
            "OMP_NUM_THREADS": "1",
        }

        def start(name: str, *words: str) -> Command:
            home = ["--home", str(directory / f"home-{name}")]
            return Command(name, [*words, *home, "--engine", engine], env, directory)

        self.server = start("serve", "serve", "--workers", "0", "--port", str(self.port))
        self.server.wait_until_ready()
        self.workers = [start(f"worker-{n}", "worker") for n in range(num_workers)]
        for worker in self.workers:
            worker.wait_until_ready()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill_worker(self, rng: random.Random) -> None:
        rng.choice(self.workers).kill_children()

    def lose_worker(self, rng: random.Random) -> None:
        """Kill a worker with its supervisor: a new one gets another group, and its models move."""
        rng.choice(self.workers).kill()

    def kill_api(self, rng: random.Random) -> None:
        self.server.kill_children()

    def kill_server(self, rng: random.Random) -> None:
        self.server.kill()

    def restart_postgres(self, rng: random.Random) -> None:
        self.postgres.restart()

    def interrupt_s3(self, rng: random.Random) -> None:
        """Refuse connections to the object store for a while."""
        self.bucket.door.close()
        time.sleep(rng.random() * MAX_OUTAGE_SECONDS)
        self.bucket.door.open()

    @property
    def faults(self) -> dict[str, tuple[int, Callable[[random.Random], None]]]:
        """What can be killed, with a weight."""
        return {
            "worker": (8, self.kill_worker),
            "api": (5, self.kill_api),
            "server": (2, self.kill_server),
            "node": (1, self.lose_worker),
            "postgres": (2, self.restart_postgres),
            "s3": (2, self.interrupt_s3),
        }

    def close(self) -> None:
        for command in (*self.workers, self.server):
            command.stop()
        self.bucket.door.close()
        self.s3.close()
        self.postgres.stop()
