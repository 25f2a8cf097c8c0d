"""Server processes that crash, are stopped while busy, or are idle."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.support.ports import free_port
from tests.support.serve_process import (
    MODEL,
    TIMEOUT_SECONDS,
    ServeProcess,
    answers,
    eventually,
    read_response,
    send_request,
    submit_slow_job,
)
from tinkex.server_discovery import HEALTH_PATH, find_lock_holder, get_http_status
from tinkex.system.processes import is_alive


def test_killed_api_process_is_replaced_on_same_port(serve: Serve, home: Path) -> None:
    serve_process = serve(home)
    url = serve_process.ready()
    (before,) = serve_process.pids("API")
    os.kill(before, signal.SIGKILL)
    eventually(lambda: len(serve_process.pids("API")) == 2)
    # The supervisor holds the port, so no connection is refused: the response only takes
    # as long as the new process needs to start.
    assert get_http_status(url + HEALTH_PATH, TIMEOUT_SECONDS) == 200
    assert f"the API process (pid {before}) was killed by SIGKILL" in serve_process.log_text
    assert serve_process.process.poll() is None


def test_training_continues_after_worker_is_killed(serve: Serve, home: Path) -> None:
    serve_process = serve(home)
    url = serve_process.ready()
    with tinkex.ServiceClient(base_url=url, api_key=serve_process.key) as service:
        client = service.create_lora_training_client(MODEL, rank=4)
        first = client.optim_step(tinkex.AdamParams(learning_rate=0.1)).result()
        os.kill(serve_process.pids("worker")[0], signal.SIGKILL)
        second = client.optim_step(tinkex.AdamParams(learning_rate=0.1)).result()
    assert [(each.metrics or {})["step"] for each in (first, second)] == [1.0, 2.0]
    assert len(serve_process.pids("worker")) == 2


def test_killed_supervisor_takes_children_down(serve: Serve, home: Path) -> None:
    serve_process = serve(home)
    url = serve_process.ready()
    children = serve_process.pids("API") + serve_process.pids("worker")
    serve_process.send(signal.SIGKILL)
    serve_process.ended()
    eventually(lambda: not any(map(is_alive, children)))
    assert not answers(url)
    # A dying process may release its files a moment after its main thread has ended.
    eventually(lambda: find_lock_holder(serve_process.home) is None)


def test_server_starts_right_after_kill(serve: Serve, home: Path) -> None:
    port = free_port()
    killed = serve(home, port=port)
    url = killed.ready()
    killed.send(signal.SIGKILL)
    killed.ended()
    # Immediately, while the old processes may still hold the home and the port.
    following = serve(home, port=port)
    assert following.ready() == url
    assert following.key == killed.key


def test_killed_supervisor_takes_busy_worker_down(serve: Serve, home: Path) -> None:
    serve_process = serve(home, env={"TINKEX_FAKE_SECONDS": "600"})
    submit_slow_job(serve_process, serve_process.ready())
    (worker,) = serve_process.pids("worker")
    serve_process.send(signal.SIGKILL)
    eventually(lambda: not is_alive(worker))


def test_shutdown_answers_waiting_clients(serve: Serve, home: Path) -> None:
    # A long timeout, so the API process is not killed before it answers.
    slow = {"TINKEX_FAKE_SECONDS": "600", "TINKEX_STOP_SECONDS": "600"}
    serve_process = serve(home, env=slow | {"TINKEX_LONG_POLL_SECONDS": "40"})
    url = serve_process.ready()
    request_id = submit_slow_job(serve_process, url)
    waiting = send_request(url, "retrieve_future", serve_process.key, {"request_id": request_id})
    # A later request was answered, so the long poll before it is waiting.
    assert answers(url)
    eventually(lambda: state_of(serve_process, request_id) == "running")
    serve_process.send(signal.SIGTERM)
    status, answer = read_response(waiting)
    assert (status, answer["queue_state"]) == (408, "active")
    # The worker is running a job of ten minutes; do not wait for it.
    serve_process.send(signal.SIGTERM)
    assert serve_process.ended() == 0


def state_of(serve_process: ServeProcess, request_id: str) -> str:
    """The state of a job."""
    with closing(sqlite3.connect(serve_process.home.store_file)) as store:
        (state,) = store.execute("SELECT state FROM jobs WHERE id = ?", [request_id]).fetchone()
    return str(state)


def test_second_signal_kills_processes(serve: Serve, home: Path) -> None:
    slow = {"TINKEX_FAKE_SECONDS": "600", "TINKEX_STOP_SECONDS": "600"}
    serve_process = serve(home, env=slow)
    submit_slow_job(serve_process, serve_process.ready())
    serve_process.send(signal.SIGINT)
    eventually(lambda: "SIGINT: stopping the server" in serve_process.log_text)
    serve_process.send(signal.SIGINT)
    assert serve_process.ended() == 0
    assert "killing the server's processes" in serve_process.log_text


def test_idle_server_stops(serve: Serve, home: Path) -> None:
    serve_process = serve(home, "--idle-stop", "1")
    url = serve_process.ready()
    # Health checks do not count as activity.
    eventually(lambda: not answers(url))
    assert serve_process.ended() == 0
    assert "no requests for 1 s" in serve_process.log_text
    assert not serve_process.home.state_file.exists()


def test_unfinished_jobs_prevent_idle_stop(serve: Serve, home: Path) -> None:
    env = {"TINKEX_FAKE_SECONDS": "600", "TINKEX_STOP_SECONDS": "1"}
    serve_process = serve(home, "--idle-stop", "6", env=env)
    submit_slow_job(serve_process, serve_process.ready())
    touched = serve_process.home.activity_file.stat().st_mtime
    # Without requests, the unfinished job keeps the server active.
    eventually(lambda: serve_process.home.activity_file.stat().st_mtime > touched + 7)
    assert serve_process.process.poll() is None
    # The worker is running a job of ten minutes and gets one second to stop.
    serve_process.send(signal.SIGTERM)
    assert serve_process.ended() == 0
    assert "did not exit in time" in serve_process.log_text
