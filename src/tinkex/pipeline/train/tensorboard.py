"""Start, find and stop the TensorBoard server of a run."""

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

from tinkex.errors import TinkexError
from tinkex.installation import install_command
from tinkex.logs import get_logger
from tinkex.system.atomic import write_file_atomic
from tinkex.system.processes import is_alive

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 6006
#: Files in the log directory: the running server, and its output.
RECORD_FILE = ".tensorboard.json"
LOG_FILE = ".tensorboard.log"
_BUSY = "already in use"
_ADDRESS = re.compile(r"http://\S+?:(\d+)/")
_PAUSE_SECONDS = 0.1
_STOP_SECONDS = 10.0

log = get_logger(__name__)


class TensorBoardError(TinkexError):
    """TensorBoard failed to start."""


@dataclass(slots=True)
class TensorBoard:
    """A running TensorBoard server."""

    url: str
    pid: int
    logdir: Path
    is_reused: bool = False
    """True if another run started the server and will stop it."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def stop(self) -> None:
        """Stop the server unless it belongs to another run; may be called twice."""
        if self.is_reused or not self.pid:
            return
        _stop_process(self.pid, self._process)
        (self.logdir / RECORD_FILE).unlink(missing_ok=True)
        self.pid = 0

    @property
    def log_file(self) -> Path:
        """Output of the server."""
        return self.logdir / LOG_FILE

    def wait(self) -> None:
        """Block until the server exits."""
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
    """Start a server for a log directory, or reuse a running one; None without the package.

    If the port is in use, the server chooses a free one.
    """
    if importlib.util.find_spec("tensorboard") is None:
        log.warning(
            "TensorBoard is not installed; install it with: %s", install_command("pipeline")
        )
        return None
    logdir.mkdir(parents=True, exist_ok=True)
    logdir = logdir.resolve()
    running = find_running(logdir)
    if running is not None:
        return running
    try:
        return _launch(logdir, host, port, wait_seconds)
    except _PortInUse:
        log.warning("port %d is in use, so TensorBoard chooses another", port)
        return _launch(logdir, host, 0, wait_seconds)


class _PortInUse(Exception):
    """Another process listens on the port."""


def find_running(logdir: Path) -> TensorBoard | None:
    """Return the running server of this directory, or None.

    If the run that started it has died, this process takes it over.
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
        # A separate process group: Ctrl-C goes to the run, which stops the server after saving.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = _wait_until_ready(process, logdir, wait_seconds)
    except BaseException:  # also on Ctrl-C, no server may be left behind
        _stop_process(process.pid, process)
        raise
    _write_record(logdir, url, process.pid)
    return TensorBoard(url, process.pid, logdir, False, process)


def _wait_until_ready(process: subprocess.Popen[bytes], logdir: Path, wait_seconds: float) -> str:
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        has_exited = process.poll() is not None
        output = (logdir / LOG_FILE).read_text(encoding="utf-8", errors="replace")
        if has_exited and _BUSY in output:
            raise _PortInUse
        if has_exited:
            raise TensorBoardError(
                f"TensorBoard exited with code {process.returncode}: {_last_line(output)}",
                hint=f"See {logdir / LOG_FILE}, or disable it with TB_AUTO=0.",
            )
        address = _ADDRESS.search(output)
        if address and _served_directory(address[0]) == str(logdir):
            return address[0]
        time.sleep(_PAUSE_SECONDS)
    raise TensorBoardError(
        f"TensorBoard did not answer within {wait_seconds:.0f} seconds",
        hint=f"See {logdir / LOG_FILE}, or disable it with TB_AUTO=0.",
    )


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _served_directory(url: str) -> str | None:
    """Return the log directory of the TensorBoard server at a URL, or None."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}data/environment", timeout=5.0) as response:
            environment: object = json.load(response)
    except (OSError, ValueError, urllib.error.URLError):
        return None
    location = environment.get("data_location") if isinstance(environment, dict) else None
    return str(location) if location else None


def _write_record(logdir: Path, url: str, pid: int) -> None:
    record = {"url": url, "pid": pid, "owner": os.getpid(), "logdir": str(logdir)}
    write_file_atomic(logdir / RECORD_FILE, json.dumps(record).encode() + b"\n")


def _stop_process(pid: int, process: subprocess.Popen[bytes] | None) -> None:
    """Terminate a server and its children; kill them after a timeout."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline:
        has_exited = process.poll() is not None if process is not None else not is_alive(pid)
        if has_exited:
            return
        time.sleep(_PAUSE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if process is not None:
        process.wait()
