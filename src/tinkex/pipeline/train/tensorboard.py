"""A TensorBoard server for a run: started, found again, watched until it answers, stopped."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tinkex.errors import TinkexError
from tinkex.installation import install_command
from tinkex.logs import get_logger
from tinkex.system.atomic import write_file_atomic
from tinkex.system.processes import is_alive

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 6006
#: Beside the curves: who serves them, and what the server printed.
RECORD_FILE = ".tensorboard.json"
LOG_FILE = ".tensorboard.log"
_BUSY = "already in use"
_ADDRESS = re.compile(r"http://\S+?:(\d+)/")
_PAUSE_SECONDS = 0.1
_STOP_SECONDS = 10.0

log = get_logger(__name__)


class TensorBoardError(TinkexError):
    """TensorBoard did not come up."""


@dataclass(slots=True)
class TensorBoard:
    """A server that answers."""

    url: str
    pid: int
    logdir: Path
    is_reused: bool = False
    """True when another run started it, and stops it."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def stop(self) -> None:
        """Stop the server, unless it belongs to another run; twice is no error."""
        if self.is_reused or not self.pid:
            return
        _stop_process(self.pid, self._process)
        (self.logdir / RECORD_FILE).unlink(missing_ok=True)
        self.pid = 0

    @property
    def log_file(self) -> Path:
        """What the server printed."""
        return self.logdir / LOG_FILE

    def wait(self) -> None:
        """Block until the server ends by itself."""
        while self._process.poll() is None if self._process is not None else is_alive(self.pid):
            time.sleep(_PAUSE_SECONDS)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def start_tensorboard(
    logdir: Path,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    wait_seconds: float = 60.0,
) -> TensorBoard | None:
    """Serve a directory of curves, or find who does; None, with a hint, without the package.

    A port that is taken is replaced by a free one, which the server itself chooses.
    """
    if importlib.util.find_spec("tensorboard") is None:
        log.warning("TensorBoard is not installed: %s adds it", install_command("pipeline"))
        return None
    logdir.mkdir(parents=True, exist_ok=True)
    logdir = logdir.resolve()
    found = find_running(logdir)
    if found is not None:
        return found
    try:
        return _launch(logdir, host, port, wait_seconds)
    except _PortInUse:
        log.warning("port %d is taken, so TensorBoard chooses another", port)
        return _launch(logdir, host, 0, wait_seconds)


class _PortInUse(Exception):
    """Somebody else listens there."""


def find_running(logdir: Path) -> TensorBoard | None:
    """The server that a run started for this directory, if it still answers.

    One whose run has died without stopping it belongs to whoever finds it.
    """
    try:
        record = json.loads((logdir / RECORD_FILE).read_text(encoding="utf-8"))
        url, pid, owner = str(record["url"]), int(record["pid"]), int(record["owner"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if _served_directory(url) != str(logdir):
        return None
    is_reused = owner != os.getpid() and is_alive(owner)
    if not is_reused:
        _write_record(logdir, url, pid)
    return TensorBoard(url, pid, logdir, is_reused)


def _launch(logdir: Path, host: str, port: int, wait_seconds: float) -> TensorBoard:
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
    command += ["--host", host, "--port", str(port)]
    log_path = logdir / LOG_FILE
    with log_path.open("wb") as output:
        # A group of its own: Ctrl-C is for the run, which stops the server when it has saved.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = _wait_until_ready(process, logdir, wait_seconds)
    except BaseException:
        _stop_process(process.pid, process)
        raise
    _write_record(logdir, url, process.pid)
    return TensorBoard(url, process.pid, logdir, False, process)


def _wait_until_ready(process: subprocess.Popen[bytes], logdir: Path, wait_seconds: float) -> str:
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        is_over = process.poll() is not None
        output = (logdir / LOG_FILE).read_text(encoding="utf-8", errors="replace")
        if is_over and _BUSY in output:
            raise _PortInUse
        if is_over:
            raise TensorBoardError(
                f"TensorBoard ended with code {process.returncode}: {_last_line(output)}",
                hint=f"See {logdir / LOG_FILE}, or set TB_AUTO=0 to do without it.",
            )
        address = _ADDRESS.search(output)
        if address and _served_directory(address[0]) == str(logdir):
            return address[0]
        time.sleep(_PAUSE_SECONDS)
    raise TensorBoardError(
        f"TensorBoard did not answer within {wait_seconds:.0f} seconds",
        hint=f"See {logdir / LOG_FILE}, or set TB_AUTO=0 to do without it.",
    )


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _served_directory(url: str) -> str | None:
    """What the server at an address serves, or None when nobody answers as TensorBoard."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}data/environment", timeout=5.0) as reply:
            answer: Any = json.load(reply)
    except (OSError, ValueError, urllib.error.URLError):
        return None
    location = answer.get("data_location") if isinstance(answer, dict) else None
    return str(location) if location else None


def _write_record(logdir: Path, url: str, pid: int) -> None:
    record = {"url": url, "pid": pid, "owner": os.getpid(), "logdir": str(logdir)}
    write_file_atomic(logdir / RECORD_FILE, json.dumps(record).encode() + b"\n")


def _stop_process(pid: int, process: subprocess.Popen[bytes] | None) -> None:
    """Ask a server and its children to stop, and make them after a while."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline:
        is_over = process.poll() is not None if process is not None else not is_alive(pid)
        if is_over:
            return
        time.sleep(_PAUSE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if process is not None:
        process.wait()
