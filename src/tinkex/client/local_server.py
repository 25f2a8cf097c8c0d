"""Find or start the local server, for clients that name neither a server nor a key."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tinkex.client.config import Config
from tinkex.client.credentials import find_credential
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.installation import install_command, missing_libraries
from tinkex.logs import get_logger
from tinkex.server_discovery import ServerState, find_lock_holder, find_server
from tinkex.settings import package_version, read_variables
from tinkex.system.locks import lock_descriptor

logger = get_logger(__name__)
#: The server stops after this many seconds without a request.
IDLE_STOP_SECONDS = 900
#: How long a start may take; it includes loading a large model from disk.
START_TIMEOUT_SECONDS = 180.0
#: Progress is reported after this delay: on a terminal a line with the seconds, else a log line
#: at intervals.
PROGRESS_DELAY_SECONDS = 2.0
TERMINAL_REFRESH_SECONDS = 1.0
LOG_INTERVAL_SECONDS = 15.0
#: A larger log file is rotated when a server starts.
MAX_LOG_BYTES = 10 * 1024 * 1024
_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class LocalServer:
    """URL and key of the local server."""

    url: str
    key: str = field(repr=False)


def with_local_server(config: Config, *, needs_worker: bool = True) -> Config:
    """Add the local server's URL and key to a config that has neither a server nor a key.

    Starts the server if it is not running, which blocks for a second or two. If the caller does
    not need the worker, it starts with the first job.
    """
    if config.local_home is None or config.api_key or sys.platform == "win32":
        return config
    if find_credential(None, config.environment) is not None:
        return config
    home = Home(config.local_home)
    server = ensure_server(home, needs_worker=needs_worker)
    return config.evolve(
        base_url=server.url, api_key=server.key, key_source=str(home.key_file), local_home=None
    )


def ensure_server(home: Home, *, needs_worker: bool = True) -> LocalServer:
    """Return the server of a home, starting it if necessary; concurrent callers share one start."""
    state = find_server(home)
    if state is None or (needs_worker and state.worker_wakeup is not None):
        home.create()
        progress = _StartProgress(f"tinkex: waiting for the local server in {home.root} to start")
        with _home_errors(home), contextlib.closing(progress), _exclusive_start(home, progress):
            state = _start_server(home, progress, needs_worker=needs_worker)
    # Counts as activity, so that an idle server does not stop now.
    with contextlib.suppress(OSError):
        os.utime(home.activity_file)
    if state.version != package_version():
        logger.warning(
            "The local server at %s runs tinkex %s, but this is %s; run `tinkex serve stop`, and "
            "the next client starts a new one",
            *(state.url, state.version, package_version()),
        )
    return LocalServer(state.url, _read_key(home))


def _read_key(home: Home) -> str:
    try:
        return home.key_file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the key of the local server from {home.key_file}",
            hint="Run `tinkex serve stop`: the next start creates a new key.",
        ) from error


# --- starting -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _home_errors(home: Home) -> Iterator[None]:
    """Turn an OSError in a home into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot start a local server in {home.root}: {error.strerror or error}",
            hint="Set TINKEX_HOME to a writable directory, or pass base_url=...",
        ) from error


@contextlib.contextmanager
def _exclusive_start(home: Home, progress: _StartProgress) -> Iterator[None]:
    """Hold the lock that lets one process at a time start a server in this home."""
    with home.start_lock.open("a") as file:
        while not lock_descriptor(file.fileno()):
            progress.update()
            time.sleep(_POLL_SECONDS)
        yield


def _start_server(home: Home, progress: _StartProgress, *, needs_worker: bool) -> ServerState:
    """Start a server unless one is running, and its worker if the caller needs it."""
    process: subprocess.Popen[bytes] | None = None
    log_start = 0
    ends_at = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        state = find_server(home)
        if state is not None and (state.worker_wakeup is None or not needs_worker):
            return state
        if state is not None:
            # Repeated until the worker runs: a datagram may be lost.
            _wake_worker(state)
        elif process is None and not _is_home_locked(home):
            _check_installed(home)
            log_start = _log_size(home)
            process = _launch_process(home, needs_worker=needs_worker)
        # If another process holds the home, its server may be about to respond.
        elif process and process.returncode is not None and find_lock_holder(home) is None:
            raise _start_error(home, log_start, f"ended with exit code {process.returncode}")
        if time.monotonic() > ends_at:
            reason = f"did not respond within {START_TIMEOUT_SECONDS:g} s"
            raise _start_error(home, log_start, reason)
        progress.update()
        time.sleep(_POLL_SECONDS)


def _is_home_locked(home: Home) -> bool:
    """True if a server holds the home: it is starting or stopping."""
    holder = find_lock_holder(home)
    return holder is not None and holder.is_alive


def _wake_worker(state: ServerState) -> None:
    """Ask a server to start its worker."""
    host, _, port = (state.worker_wakeup or "").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"look", (host, int(port)))


def _check_installed(home: Home) -> None:
    missing = missing_libraries("server", "torch")
    # A configured server may use an engine that does not need torch.
    is_configured = home.config_file.exists() or bool(read_variables(["TINKEX_ENGINE"]))
    if not missing or (is_configured and not missing_libraries("server")):
        return
    raise ConfigError(
        "no API key and no server were given, and a local server needs "
        f"{', '.join(missing)} (not installed)",
        hint=f"Run {install_command('server', 'torch')}, pass api_key=... or base_url=..., or set "
        "TINKER_API_KEY.",
    )


def _launch_process(home: Home, *, needs_worker: bool) -> subprocess.Popen[bytes]:
    """Start a server process that outlives this one."""
    on_demand = {} if needs_worker else {"TINKEX_WORKER_ON_DEMAND": "true"}
    flags = ("--host", "127.0.0.1", "--port", "0", "--idle-stop", str(IDLE_STOP_SECONDS))
    with home.log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tinkex", "serve", "--home", str(home.root), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home.root,
            env={**os.environ, **on_demand},
            start_new_session=True,
        )
    # Reaps the process if it ends before this one.
    threading.Thread(target=process.wait, name="tinkex-local-server", daemon=True).start()
    return process


def _log_size(home: Home) -> int:
    """Return the size of the log file, rotating it first if it is too large."""
    log = home.log_file
    log.parent.mkdir(mode=0o700, exist_ok=True)
    size = log.stat().st_size if log.exists() else 0
    if size <= MAX_LOG_BYTES:
        return size
    log.replace(log.with_suffix(".log.1"))
    return 0


def _start_error(home: Home, log_start: int, reason: str) -> ConfigError:
    with home.log_file.open("rb") as file:
        file.seek(log_start)
        tail = file.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return ConfigError(
        "\n".join([f"the local server in {home.root} {reason}; end of its log:", *tail]),
        hint="Run `tinkex serve` to see more, or use another server with base_url=...",
    )


class _StartProgress:
    """Reports a slow start on stderr: one updating line on a terminal, else a few lines."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._started_at = time.monotonic()
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._next_update_at = self._started_at + PROGRESS_DELAY_SECONDS
        self._has_line = False

    def update(self) -> None:
        """Report the elapsed time, if a report is due."""
        now = time.monotonic()
        if now < self._next_update_at or sys.stderr is None:
            return
        if self._is_terminal:
            self._next_update_at, self._has_line = now + TERMINAL_REFRESH_SECONDS, True
            sys.stderr.write(f"\r\x1b[K{self._text} ({now - self._started_at:.0f} s)")
        else:
            self._next_update_at = now + LOG_INTERVAL_SECONDS
            sys.stderr.write(f"{self._text}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Remove the line from a terminal."""
        if self._has_line:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
