"""Several workers on one store: work is divided, and nothing is lost when one of them goes."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.support.serve_process import MODEL, TIMEOUT_SECONDS, ServeProcess, eventually

NUM_MODELS = 4
#: The shortest time after which models of a lost worker move.
MOVE_SECONDS = "15"
StartWorker = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_worker(home: Path) -> Iterator[StartWorker]:
    started: list[subprocess.Popen[str]] = []

    def start(group: str) -> subprocess.Popen[str]:
        """Start `tinkex worker` and wait until it is ready."""
        words = ["worker", "--home", str(home), "--group", group]
        process = subprocess.Popen(
            [sys.executable, "-m", "tinkex", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == f"tinkex worker ready: group {group}\n"
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=TIMEOUT_SECONDS)


def groups_of_models(server: ServeProcess) -> dict[str, int]:
    with closing(sqlite3.connect(server.home.store_file)) as db:
        return dict(db.execute("SELECT group_id, count(*) FROM runs GROUP BY group_id"))


def datum() -> tinkex.Datum:
    tokens = list(range(1, 10))
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 8},
    )


def train(clients: list[tinkex.TrainingClient], num_steps: int) -> list[list[float]]:
    """Train all models and return their losses by step."""
    losses = []
    for _ in range(num_steps):
        passes = [client.forward_backward([datum()], "cross_entropy") for client in clients]
        steps = [client.optim_step(tinkex.AdamParams(learning_rate=0.1)) for client in clients]
        losses.append([each.result(TIMEOUT_SECONDS).metrics["loss:sum"] for each in passes])
        for step in steps:
            step.result(TIMEOUT_SECONDS)
    return losses


def make_models(service: tinkex.ServiceClient) -> list[tinkex.TrainingClient]:
    return [service.create_lora_training_client(MODEL, rank=4, seed=1) for _ in range(NUM_MODELS)]


def assert_equal_models(losses: list[list[float]]) -> None:
    """All models got the same work, wherever they were: they have the same losses."""
    assert all(len(set(step)) == 1 for step in losses)
    assert len({step[0] for step in losses}) == len(losses)


def test_models_are_divided_and_survive_a_killed_worker(serve: Serve, home: Path) -> None:
    server = serve(home, "--workers", "2")
    with tinkex.ServiceClient(base_url=server.ready(), api_key=server.key) as service:
        clients = make_models(service)
        losses = train(clients, 2)
        assert sorted(groups_of_models(server)) == ["", "local-2"]
        before = server.pids("worker")
        os.kill(before[1], signal.SIGKILL)
        losses += train(clients, 3)
    assert_equal_models(losses)
    assert len(server.pids("worker")) == 3
    # The worker came back in time, so its models stayed.
    assert sorted(groups_of_models(server)) == ["", "local-2"]


def test_stopped_worker_hands_its_models_over(
    serve: Serve, home: Path, start_worker: StartWorker
) -> None:
    server = serve(home)
    url = server.ready()
    worker = start_worker("extra")
    with tinkex.ServiceClient(base_url=url, api_key=server.key) as service:
        clients = make_models(service)
        losses = train(clients, 2)
        assert sorted(groups_of_models(server)) == ["", "extra"]
        worker.send_signal(signal.SIGINT)
        losses += train(clients, 3)
        _, log = worker.communicate(timeout=TIMEOUT_SECONDS)
    assert worker.returncode == 0, log
    assert "0 models or samples stay" in log
    assert_equal_models(losses)
    assert groups_of_models(server) == {"": NUM_MODELS}


def test_models_of_a_lost_worker_move(
    serve: Serve, home: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_MOVE_AFTER_SECONDS", MOVE_SECONDS)
    server = serve(home)
    url = server.ready()
    worker = start_worker("lost")
    with tinkex.ServiceClient(base_url=url, api_key=server.key) as service:
        clients = make_models(service)
        losses = train(clients, 2)
        assert sorted(groups_of_models(server)) == ["", "lost"]
        # The supervisor goes first, so that it does not restart its worker.
        os.kill(worker.pid, signal.SIGKILL)
        losses += train(clients, 3)
    assert_equal_models(losses)
    assert groups_of_models(server) == {"": NUM_MODELS}
    assert "group 'lost' is gone" in server.log_text


def test_server_without_workers_accepts_work_for_later(
    serve: Serve, home: Path, start_worker: StartWorker
) -> None:
    server = serve(home, "--workers", "0")
    url = server.ready()
    worker = start_worker("only")
    with tinkex.ServiceClient(base_url=url, api_key=server.key) as service:
        (client, *_) = make_models(service)
        losses = train([client], 1)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(TIMEOUT_SECONDS)
        late = client.forward_backward([datum()], "cross_entropy")
        start_worker("only")
        assert late.result(TIMEOUT_SECONDS).metrics["loss:sum"] < losses[0][0]
    eventually(lambda: groups_of_models(server) == {"only": NUM_MODELS})


def cluster(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tinkex", "cluster", *words, "--home", str(home)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def test_cluster_commands_show_and_drain_groups(
    serve: Serve, home: Path, start_worker: StartWorker
) -> None:
    server = serve(home)
    url = server.ready()
    alone = cluster(home, "drain", "default")
    assert alone.returncode == 1
    assert "no other group can take the models of 'default'" in alone.stderr
    worker = start_worker("extra")
    with tinkex.ServiceClient(base_url=url, api_key=server.key) as service:
        losses = train(make_models(service), 1)
        rows = json.loads(cluster(home, "status", "--json").stdout)
        assert [(row["group"], row["state"]) for row in rows] == [
            ("default", "ready"),
            ("extra", "ready"),
        ]
        assert sum(row["models"] for row in rows) == NUM_MODELS
        with urllib.request.urlopen(f"{url}/metrics") as response:
            text = response.read().decode()
        assert 'tinkex_group_models{group="extra"}' in text
        drained = cluster(home, "drain", "extra", "--json")
        assert drained.returncode == 0, drained.stderr
        assert worker.wait(TIMEOUT_SECONDS) == 0
    assert groups_of_models(server) == {"": NUM_MODELS}
    assert_equal_models(losses)
    no_cluster = cluster(home, "nodes")
    assert no_cluster.returncode == 1
    assert "no server runs its workers on a cluster with this store" in no_cluster.stderr
    missing = cluster(home, "drain", "nowhere")
    assert missing.returncode == 1
    assert "group 'nowhere' does not exist" in missing.stderr


def test_server_without_a_cluster_does_not_import_ray(serve: Serve, home: Path) -> None:
    server = serve(home, env={"PYTHONPROFILEIMPORTTIME": "1"})
    server.ready()
    log = server.log_text
    assert "tinkex.server.process.supervisor" in log
    assert "tinkex.jobs.worker" in log
    assert not re.search(r"\| +ray$", log, re.MULTILINE)
