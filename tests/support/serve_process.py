"""A real `tinkex serve`, started and watched by a test."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinkex.home import Home
from tinkex.server_discovery import HEALTH_PATH, get_http_status
from tinkex.system.processes import is_alive

#: Nothing here takes this long; it only says that nothing hangs.
TIMEOUT_SECONDS = 180.0
MODEL = "tinkex/bigram"
_READY = re.compile(r"tinkex server ready at (http://\S+)\n")
_STARTED = re.compile(r"the (API|worker)(?: \d+)? process has pid (\d+)")


class ServeProcess:
    """One server; its log tells which processes it has."""

    def __init__(self, home: Path, *flags: str, port: int = 0, env: dict[str, str] | None = None):
        self.home = Home(home)
        home.parent.mkdir(parents=True, exist_ok=True)
        name = f"{home.name}-{time.monotonic_ns()}"
        self.log, self.output = home.parent / f"{name}.log", home.parent / f"{name}.out"
        words = ["--home", str(home), "--port", str(port), "--log-level", "debug", *flags]
        with self.log.open("w") as log, self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tinkex", "serve", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env={**os.environ, **(env or {})},
                # Signals of a test's terminal are not for it.
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> str:
        """The URL, when the server says that it is ready."""
        eventually(lambda: self.output.stat().st_size > 0 or self.process.poll() is not None)
        found = _READY.fullmatch(self.output.read_text())
        assert found, f"no ready line but {self.output.read_text()!r}; the log:\n{self.log_text}"
        return found[1]

    @property
    def log_text(self) -> str:
        return self.log.read_text()

    def pids(self, role: str) -> list[int]:
        """The pids that a role has had, the newest last."""
        return [int(pid) for name, pid in _STARTED.findall(self.log_text) if name == role]

    @property
    def key(self) -> str:
        return self.home.key_file.read_text().strip()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """The exit code; the ready line is all that was printed."""
        code = self.process.wait(TIMEOUT_SECONDS)
        assert _READY.fullmatch(self.output.read_text())
        return code

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
            try:
                self.process.wait(TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        eventually(lambda: not any(map(is_alive, self.pids("API") + self.pids("worker"))))


def eventually(check: Callable[[], bool], seconds: float = TIMEOUT_SECONDS) -> None:
    """Wait until something is true; fails if it never is."""
    ends_at = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < ends_at, "it never came true"
        time.sleep(0.02)


def answers(url: str) -> bool:
    """Whether a server answers there now."""
    return get_http_status(url + HEALTH_PATH, 5.0) == 200


def send_request(url: str, path: str, key: str, body: Any) -> http.client.HTTPConnection:
    """Send one request, without any client of ours between."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS
    )
    headers = {"X-API-Key": key, "Content-Type": "application/json"}
    connection.request("POST", f"/api/v1/{path}", json.dumps(body), headers)
    return connection


def read_response(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    """Wait for the answer to a request."""
    try:
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def post(url: str, path: str, key: str, body: Any) -> tuple[int, Any]:
    """One request and its answer."""
    return read_response(send_request(url, path, key, body))


def create_session(serve_process: ServeProcess, url: str) -> str:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"}
    status, answer = post(url, "create_session", serve_process.key, body)
    assert status == 200, answer
    return str(answer["session_id"])


def submit_slow_job(serve_process: ServeProcess, url: str) -> str:
    """A promise that takes long, if the engine is slow."""
    body = {
        "session_id": create_session(serve_process, url),
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 4},
        "type": "create_model",
    }
    status, made = post(url, "create_model", serve_process.key, body)
    assert status == 200, made
    step = {
        "model_id": made["model_id"],
        "seq_id": 1,
        "adam_params": {"learning_rate": 0.1},
        "type": "optim_step",
    }
    status, promise = post(url, "optim_step", serve_process.key, step)
    assert status == 200, promise
    return str(promise["request_id"])


def run_tinkex(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a `tinkex` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tinkex", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, **(env or {})},
    )
