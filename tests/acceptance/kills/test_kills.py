"""Kill the API process, the worker or the whole server while a client trains."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.support.ports import free_port
from tests.support.postgres import PostgresServer
from tinkex import types

BASE_MODEL = "tinkex/bigram"
NUM_STEPS = 40
NUM_KILLS = 10
#: Only a limit against hanging.
TIMEOUT_SECONDS = 120.0


class Server:
    """`tinkex serve` on a fixed port; single processes or all of them can be killed."""

    def __init__(self, home: Path, *flags: str) -> None:
        self.home = home
        self.flags = flags
        # It restarts several times, and no other process may take the port in between.
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return (self.home / "key").read_text().strip()

    def start(self) -> None:
        command = [sys.executable, "-m", "tinkex", "serve", "--engine", "fake"]
        options = ["--home", str(self.home), "--port", str(self.port), "--log-level", "error"]
        environment = {
            **os.environ,
            # A job that was running during many kills must not count as failed.
            "TINKEX_MAX_ATTEMPTS": "1000000",
            "TINKEX_SNAPSHOT_CHANGES": "7",
        }
        with (self.home / "stderr").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *options, *self.flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "ready at" in line, (self.home / "stderr").read_text()[-2000:]

    def children(self, role: str) -> list[int]:
        """Pids of the server's processes with this role."""
        assert self.process is not None
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split() if role in _command(int(pid))]

    def kill(self, target: str) -> None:
        """Kill -9 `api`, `worker`, `both` or `all`; the whole server is then restarted."""
        assert self.process is not None
        roles = {"api": ["api_process"], "worker": ["worker_process"]}
        for role in roles.get(target, ["api_process", "worker_process"]):
            for pid in self.children(role):
                _kill(pid)
        if target == "all":
            self.process.kill()
            self.process.communicate()
            self.start()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.communicate(timeout=TIMEOUT_SECONDS)
            assert self.process.returncode == 0, (self.home / "stderr").read_text()[-2000:]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    # It may be dead already, and its successor not started yet.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def serve(home: Path, *flags: str) -> Iterator[Server]:
    home.mkdir(exist_ok=True)
    server = Server(home, *flags)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def datum(step: int) -> types.Datum:
    tokens = [(step * 7 + offset) % 60 + 3 for offset in range(9)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 8},
    )


def train(server: Server, progress: threading.Semaphore) -> list[Any]:
    """All results of the client: losses, metrics, saved paths and samples."""
    service = tinkex.ServiceClient(base_url=server.url, api_key=server.key)
    model = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3)
    seen: list[Any] = []
    prompt = types.ModelInput.from_ints([3, 4, 5])
    for step in range(NUM_STEPS):
        passed = model.forward_backward([datum(step)], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=0.05))
        seen.append((passed.result().metrics, stepped.result().metrics))
        progress.release()
        if step % 8 == 3:
            name = f"step-{step}"
            seen.append(model.save_state(name).result().path.rpartition("/")[2])
            sampler = model.save_weights_and_get_sampling_client()
            params = types.SamplingParams(max_tokens=6, seed=step)
            seen.append([s.tokens for s in sampler.sample(prompt, 2, params).result().sequences])
    service.close("success")
    return seen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with serve(tmp_path_factory.mktemp("calm")) as server:
        return train(server, threading.Semaphore(0))


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_training_results_are_identical_after_kills(
    tmp_path: Path, undisturbed: list[Any], seed: int
) -> None:
    with serve(tmp_path / "home") as server:
        assert train_among_kills(server, random.Random(seed), NUM_KILLS) == undisturbed


def test_training_after_kills_on_postgresql_with_several_api_processes(
    tmp_path: Path, undisturbed: list[Any], postgres: PostgresServer
) -> None:
    url = postgres.create_database()
    try:
        with serve(tmp_path / "home", "--store", url, "--api-processes", "2") as server:
            assert train_among_kills(server, random.Random(3), 6) == undisturbed
    finally:
        postgres.drop_database(url)


def test_training_after_restarts_of_postgresql(tmp_path: Path, undisturbed: list[Any]) -> None:
    postgres = PostgresServer()
    try:
        flags = ["--store", postgres.create_database(), "--api-processes", "2", "--workers", "2"]
        with serve(tmp_path / "home", *flags) as server, training(server) as (progress, results):
            for _ in range(2):
                await_steps(server, progress, 2)
                postgres.shut_down()
                assert_unavailable(server)
                postgres.start_again()
            assert results() == undisturbed
    finally:
        postgres.stop()


def assert_unavailable(server: Server) -> None:
    """Requests that need the store get 503 and are told when to repeat them."""
    headers = {"X-API-Key": server.key, "Content-Type": "application/json"}
    body = b'{"tags": [], "user_metadata": {}, "sdk_version": "1"}'
    for _ in range(4):
        request = urllib.request.Request(f"{server.url}/api/v1/create_session", body, headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        assert caught.value.code == 503, caught.value.read()
        assert int(caught.value.headers["Retry-After"]) > 0
        caught.value.close()


def train_among_kills(server: Server, rng: random.Random, num_kills: int) -> list[Any]:
    """The results of a client that trains while processes are killed."""
    with training(server) as (progress, results):
        for _ in range(num_kills):
            # Let the loop progress between two kills, then kill at a random moment.
            await_steps(server, progress, 2)
            time.sleep(rng.random() * 0.05)
            server.kill(rng.choice(["api", "worker", "worker", "both", "all"]))
        return results()


@contextmanager
def training(
    server: Server,
) -> Iterator[tuple[threading.Semaphore, Callable[[], list[Any]]]]:
    """Train in a thread; yields what counts its steps, and a function that returns all results."""
    outcome: list[list[Any]] = []
    progress = threading.Semaphore(0)
    loop = threading.Thread(target=lambda: outcome.append(train(server, progress)), daemon=True)
    loop.start()

    def results() -> list[Any]:
        loop.join(2 * TIMEOUT_SECONDS)
        assert outcome, (server.home / "stderr").read_text()[-2000:]
        return outcome[0]

    yield progress, results


def await_steps(server: Server, progress: threading.Semaphore, num_steps: int) -> None:
    for _ in range(num_steps):
        is_done = progress.acquire(timeout=TIMEOUT_SECONDS)
        assert is_done, (server.home / "stderr").read_text()[-2000:]
