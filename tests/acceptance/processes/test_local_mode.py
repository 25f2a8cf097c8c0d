"""Local mode: without a URL and a key, clients find or start the server of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.support.ports import free_port
from tests.support.serve_process import TIMEOUT_SECONDS, answers, eventually, run_tinkex
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.server_discovery import find_lock_holder, find_server, read_state
from tinkex.system.processes import is_alive

MODEL = "tinkex/bigram"
PROBE = """
import json, sys, tinkex
with tinkex.ServiceClient() as service:
    models = service.get_server_capabilities().supported_models
print(json.dumps([service.config.base_url, models[0].model_name]))
"""


@pytest.fixture(autouse=True)
def local_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Home]:
    """A separate home; its server is stopped after the test."""
    monkeypatch.setenv("TINKEX_HOME", str(home))
    yield Home(home)
    if find_lock_holder(Home(home)) is not None:
        run_tinkex("serve", "stop", "--force")
    assert find_lock_holder(Home(home)) is None


def pid_of(home: Home) -> int:
    state = find_server(home)
    assert state is not None
    return state.pid


def children_of(pid: int) -> dict[str, int]:
    """The child processes of a server: module name to pid."""
    table = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True)
    rows = [line.split() for line in table.stdout.splitlines()]
    return {
        args[-1].removeprefix("tinkex.server.process."): int(child_pid)
        for child_pid, parent, *args in rows
        if parent == str(pid) and args and args[-1].startswith("tinkex.server.")
    }


def train(**options: str) -> float:
    """Train with nothing configured; return the number of the step."""
    with tinkex.ServiceClient(**options) as service:
        client = service.create_lora_training_client(MODEL, rank=4)
        metrics = client.optim_step(tinkex.AdamParams(learning_rate=0.1)).result().metrics
    return (metrics or {})["step"]


def test_clients_without_configuration_share_local_server(
    local_home: Home,
) -> None:
    assert train() == 1.0
    first = pid_of(local_home)
    assert train() == 1.0
    assert pid_of(local_home) == first
    # Its log is in the home, where the commands find it.
    state = read_state(local_home)
    assert state is not None
    assert state.log == str(local_home.log_file)
    logs = run_tinkex("serve", "logs")
    assert "tinkex server ready at" in logs.stdout
    assert "Traceback" not in logs.stdout


def test_stopped_local_server_is_restarted_and_clients_continue(
    local_home: Home,
) -> None:
    # A port that no other process gets while the server is stopped.
    local_home.create()
    local_home.port_file.write_text(str(free_port()))
    with tinkex.ServiceClient() as service:
        client = service.create_lora_training_client(MODEL, rank=4)
        client.optim_step(tinkex.AdamParams(learning_rate=0.1)).result()
        first = pid_of(local_home)
        assert run_tinkex("serve", "stop").returncode == 0
        waiting = client.optim_step(tinkex.AdamParams(learning_rate=0.1))
        # Another client restarts it on the port where the first one still retries.
        with tinkex.ServiceClient() as other:
            assert other.config.base_url == service.config.base_url
        assert (waiting.result(TIMEOUT_SECONDS).metrics or {})["step"] == 2.0
    assert pid_of(local_home) != first


def test_concurrent_clients_start_one_server(local_home: Home) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROBE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(10)
    ]
    outputs = [process.communicate(timeout=2 * TIMEOUT_SECONDS) for process in started]
    assert [process.returncode for process in started] == [0] * 10, outputs
    assert len({json.loads(output)[0] for output, _ in outputs}) == 1
    assert local_home.log_file.read_text().count("tinkex server ready at") == 1
    assert "already" not in local_home.log_file.read_text()


def test_manually_started_server_is_used(serve: Serve, local_home: Home) -> None:
    serve_process = serve(local_home.root)
    url = serve_process.ready()
    assert children_of(serve_process.pid).keys() == {"api_process", "worker_process"}
    with tinkex.ServiceClient() as service:
        assert service.config.base_url == url
        assert service.get_server_capabilities().supported_models
    assert not local_home.log_file.exists()


def test_client_waits_for_manually_started_server(serve: Serve, local_home: Home) -> None:
    serve_process = serve(local_home.root)
    # It has locked the home but does not respond yet.
    eventually(
        lambda: (
            (holder := find_lock_holder(local_home)) is not None and holder.pid == serve_process.pid
        )
    )
    with tinkex.ServiceClient() as service:
        assert service.config.base_url == serve_process.ready()


def test_local_server_outlives_its_client(local_home: Home) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    url, _ = json.loads(ran.stdout)
    assert answers(url)
    pid = pid_of(local_home)
    # It has its own session, so closing the terminal does not kill it.
    assert os.getsid(pid) == pid
    run_tinkex("serve", "stop")
    eventually(lambda: not is_alive(pid))


def test_failed_start_shows_end_of_server_log(local_home: Home) -> None:
    local_home.create()
    local_home.config_file.write_text("prot = 8000\n")
    with pytest.raises(ConfigError, match=r"ended with exit code 1; end of its log:") as refused:
        tinkex.ServiceClient()
    assert "unknown setting 'prot'; did you mean 'port'?" in str(refused.value)
    # The output of the previous failure is not shown again.
    local_home.config_file.write_text("dtype = 'magic'\n")
    with pytest.raises(ConfigError, match="dtype is 'magic'") as refused:
        tinkex.ServiceClient()
    assert "prot" not in str(refused.value)


def test_stale_state_file_is_ignored(local_home: Home) -> None:
    local_home.create()
    stale = {"pid": os.getpid(), "url": "http://127.0.0.1:1", "version": "0", "started_at": 1.0}
    local_home.state_file.write_text(json.dumps(stale))
    with tinkex.ServiceClient() as service:
        assert service.config.base_url != stale["url"]
        assert service.get_server_capabilities().supported_models


def test_rest_client_uses_local_server(local_home: Home) -> None:
    assert tinkex.RestClient().list_sessions().result().sessions == []
    assert find_server(local_home) is not None


@pytest.mark.parametrize("way", ["local", "by address"])
def test_read_only_command_starts_no_worker_until_first_job(local_home: Home, way: str) -> None:
    assert train() == 1.0
    assert run_tinkex("serve", "stop").returncode == 0
    listed = run_tinkex("run", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert len(json.loads(listed.stdout)["runs"]) == 1
    state = find_server(local_home)
    assert state is not None
    assert children_of(state.pid).keys() == {"api_process"}
    # It responds without a worker while nothing has to be computed.
    assert run_tinkex("usage").returncode == 0
    assert len(tinkex.RestClient().list_training_runs().result().training_runs) == 1
    assert children_of(state.pid).keys() == {"api_process"}
    if way == "local":
        assert train() == 1.0
    else:
        # A client without access to the home: only its jobs start the worker.
        key = local_home.key_file.read_text().strip()
        assert train(base_url=state.url, api_key=key) == 1.0
    worker = children_of(state.pid)["worker_process"]
    eventually(
        lambda: (state := find_server(local_home)) is not None and state.worker_wakeup is None
    )
    os.kill(worker, signal.SIGKILL)
    assert train() == 1.0
    assert pid_of(local_home) == state.pid
    assert children_of(state.pid)["worker_process"] != worker
    assert len(json.loads(run_tinkex("run", "list", "--json").stdout)["runs"]) == 3


def test_changed_models_start_worker_for_read_only_command(
    local_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train() == 1.0
    assert run_tinkex("serve", "stop").returncode == 0
    monkeypatch.setenv("TINKEX_MODELS", "tinkex/other")
    assert run_tinkex("run", "list").returncode == 0
    assert children_of(pid_of(local_home)).keys() == {"api_process", "worker_process"}
    state = find_server(local_home)
    assert state is not None
    assert state.worker_wakeup is None
