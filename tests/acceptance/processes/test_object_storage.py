"""A server and workers on machines that share a database and an object store, but no disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.acceptance.processes.test_workers import (
    MOVE_SECONDS,
    assert_equal_models,
    datum,
    make_models,
    train,
)
from tests.support.postgres import PostgresServer
from tests.support.s3_server import S3Bucket
from tests.support.serve_process import TIMEOUT_SECONDS
from tinkex import SamplingParams

StartWorker = Callable[[Path, str], subprocess.Popen[str]]


@pytest.fixture
def store_url(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def start_worker(store_url: str, s3: S3Bucket) -> Iterator[StartWorker]:
    started: list[subprocess.Popen[str]] = []

    def start(home: Path, group: str) -> subprocess.Popen[str]:
        """Start `tinkex worker` in a home of its own and wait until it is ready."""
        places = ["--store", store_url, "--blobs", s3.url, "--home", str(home)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tinkex", "worker", *places, "--group", group],
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


def test_machines_share_no_disk(
    serve: Serve, tmp_path: Path, start_worker: StartWorker, store_url: str, s3: S3Bucket
) -> None:
    server = serve(tmp_path / "api", "--workers", "0", "--store", store_url, "--blobs", s3.url)
    url = server.ready()
    first, second = (start_worker(tmp_path / name, name) for name in ("first", "second"))
    with tinkex.ServiceClient(base_url=url, api_key=server.key) as service:
        clients = make_models(service)
        losses = train(clients, 2)
        # All models are at one worker afterwards, and come from snapshots and checkpoints.
        first.send_signal(signal.SIGINT)
        losses += train(clients, 2)
        _, log = first.communicate(timeout=TIMEOUT_SECONDS)
        assert first.returncode == 0, log
        saved = [
            client.save_state(f"state-{number}").result(TIMEOUT_SECONDS).path
            for number, client in enumerate(clients)
        ]
        third = start_worker(tmp_path / "third", "third")
        second.send_signal(signal.SIGINT)
        loaded = service.create_training_client_from_state_with_optimizer(saved[0])
        losses += train(clients, 1)
        own = loaded.forward_backward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
        assert own.metrics["loss:sum"] == losses[-1][0]
        sampler = loaded.save_weights_and_get_sampling_client()
        prompt = tinkex.ModelInput.from_ints([1, 2, 3])
        sample = sampler.sample(prompt, 1, SamplingParams(max_tokens=4, seed=1))
        assert sample.result(TIMEOUT_SECONDS).sequences
        target = tmp_path / "downloaded"
        rest = tinkex.RestClient(base_url=url, api_key=server.key)
        rest.download_checkpoint(saved[0], target).result(TIMEOUT_SECONDS)
        assert (target / "manifest.json").is_file()
        assert third.poll() is None
    assert_equal_models(losses)
    for name in ("api", "first", "second", "third"):
        assert not (tmp_path / name / "checkpoints").exists()


def test_one_machine_loads_neither_ray_nor_obstore(serve: Serve, home: Path) -> None:
    server = serve(home)
    server.ready()
    for role in ("API", "worker"):
        (pid,) = server.pids(role)
        libraries = Path(f"/proc/{pid}/maps").read_text()
        assert "_sqlite3" in libraries
        assert "obstore" not in libraries
        assert "_raylet" not in libraries
    probe = "import obstore; print(open('/proc/self/maps').read())"
    loaded = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert "obstore" in loaded.stdout


def run_serve(home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    words = ["serve", "--home", str(home), "--port", "0", *flags]
    return subprocess.run(
        [sys.executable, "-m", "tinkex", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def assert_refused(outcome: subprocess.CompletedProcess[str], sentence: str) -> None:
    """One sentence and a hint on standard error, and the exit code of a wrong setting."""
    assert outcome.returncode == 1
    assert sentence in outcome.stderr.replace("\n", " ")
    assert "Traceback" not in outcome.stderr


def test_start_explains_what_is_wrong(
    home: Path, s3: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        assert_refused(run_serve(home, "--blobs", s3.url), "refuses the credentials")
    s3.door.close()
    outcome = run_serve(home, "--blobs", s3.url)
    assert_refused(outcome, "the object store cannot be reached")
    assert "AWS_ENDPOINT_URL" in outcome.stderr


@pytest.mark.slow
def test_lost_machine_and_restarted_object_store(
    serve: Serve,
    tmp_path: Path,
    start_worker: StartWorker,
    store_url: str,
    s3: S3Bucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKEX_MOVE_AFTER_SECONDS", MOVE_SECONDS)
    monkeypatch.setenv("TINKEX_SNAPSHOT_CHANGES", "3")
    server = serve(tmp_path / "api", "--store", store_url, "--blobs", s3.url)
    url = server.ready()
    lost = start_worker(tmp_path / "lost", "lost")
    with tinkex.ServiceClient(base_url=url, api_key=server.key) as service:
        clients = make_models(service)
        losses = train(clients, 3)
        s3.restart_server()
        losses += train(clients, 2)
        os.kill(lost.pid, signal.SIGKILL)
        losses += train(clients, 3)
        paths = [client.save_state("end").result(TIMEOUT_SECONDS).path for client in clients]
    assert_equal_models(losses)
    assert len(paths) == len(clients)
