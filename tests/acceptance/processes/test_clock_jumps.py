"""A jump of the wall clock while server, worker and client run changes only timestamps."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.support.serve_process import MODEL, ServeProcess, eventually

#: Runs in every process of the server before any other code, so that all of it sees the jump.
SITE = """
import os, time

def jump():
    try:
        with open(os.environ["WALL_CLOCK_JUMP"]) as file:
            return float(file.read() or 0)
    except OSError:
        return 0.0

wall, wall_ns, read = time.time, time.time_ns, time.clock_gettime
time.time = lambda: wall() + jump()
time.time_ns = lambda: wall_ns() + int(jump() * 1e9)
time.clock_gettime = lambda which: read(which) + (jump() if which == time.CLOCK_REALTIME else 0.0)
"""
ADAM = tinkex.AdamParams(learning_rate=0.1)
DATUM = tinkex.Datum(
    model_input=tinkex.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)
NUM_STEPS = 4


class WallClock:
    """The wall clock of the server's processes and of this one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        self._file, self._seconds = folder / "jump", 0.0
        path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
        self.env = {"PYTHONPATH": path, "WALL_CLOCK_JUMP": str(self._file)}
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + self._seconds)

    def jump(self, hours: float) -> None:
        self._seconds = hours * 3600.0
        self._file.write_text(str(self._seconds))


def lease_of(serve_process: ServeProcess) -> tuple[int, float]:
    with closing(sqlite3.connect(serve_process.home.store_file)) as store:
        epoch, until = store.execute("SELECT epoch, until FROM leases").fetchone()
    return int(epoch), float(until)


def num_expired_sessions(serve_process: ServeProcess) -> int:
    query = "SELECT count(*) FROM sessions WHERE expired_at IS NOT NULL"
    with closing(sqlite3.connect(serve_process.home.store_file)) as store:
        return int(store.execute(query).fetchone()[0])


def step(client: tinkex.TrainingClient) -> tuple[float, float]:
    """Train one step; return the loss before it and its number."""
    passed = client.forward_backward([DATUM], "cross_entropy").result()
    updated = client.optim_step(ADAM).result()
    return passed.metrics["loss:sum"], (updated.metrics or {})["step"]


def sample(sampler: tinkex.SamplingClient) -> list[int]:
    prompt = tinkex.ModelInput.from_ints([1, 2])
    params = tinkex.SamplingParams(max_tokens=5, seed=3)
    return list(sampler.sample(prompt, 1, params).result().sequences[0].tokens)


def test_training_and_sampling_continue_through_jumps_of_the_wall_clock(
    serve: Serve, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_clock = WallClock(tmp_path, monkeypatch)
    serve_process = serve(home, env=wall_clock.env)
    url = serve_process.ready()
    rest = tinkex.RestClient(base_url=url, api_key=serve_process.key)
    with tinkex.ServiceClient(base_url=url, api_key=serve_process.key) as service:
        expected = [step(client) for client in [new_model(service)] for _ in range(NUM_STEPS)]
        client = new_model(service)
        losses = [step(client)]
        unfetched = client.forward([DATUM], "cross_entropy")
        saved = client.save_state("kept", ttl_seconds=3600).result().path
        sampler = client.save_weights_and_get_sampling_client()
        tokens = sample(sampler)
        first_lease = lease_of(serve_process)

        for number, hours in enumerate((28.0, -2.0), start=1):
            wall_clock.jump(hours)
            # Logged at the end of a round of housekeeping that ran after the jump.
            eventually(lambda n=number: serve_process.log_text.count("the wall clock is now") == n)
            losses.append(step(client))
            assert sample(sampler) == tokens
            listed = rest.list_user_checkpoints().result().checkpoints
            assert saved in {checkpoint.tinker_path for checkpoint in listed}
            assert num_expired_sessions(serve_process) == 0

        assert unfetched.result().metrics["loss:sum"] == losses[1][0]
        eventually(lambda: lease_of(serve_process)[1] > first_lease[1])
        assert lease_of(serve_process)[0] == first_lease[0]
        assert len(serve_process.pids("worker")) == 1

        # The next worker starts with another wall clock than its server.
        wall_clock.jump(28.0)
        os.kill(serve_process.pids("worker")[-1], signal.SIGKILL)
        losses.append(step(client))
        eventually(lambda: serve_process.log_text.count("the wall clock is now") == 3)
        assert num_expired_sessions(serve_process) == 0
        rest.download_checkpoint(saved, tmp_path / "downloaded").result()
    assert losses == expected


def new_model(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4, seed=1)
