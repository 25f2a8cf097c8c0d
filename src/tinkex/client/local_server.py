"""The server of this machine: found, or started in the background, when no other is named."""

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

if sys.platform != "win32":
    import fcntl

logger = get_logger(__name__)
#: A server that nobody has asked for so long stops by itself.
IDLE_STOP_SECONDS = 900
#: How long a start may take; a large model is read from disk meanwhile.
START_TIMEOUT_SECONDS = 180.0
#: After so long a person learns what takes time; a terminal shows the seconds, a log a line now
#: and then.
PROGRESS_DELAY_SECONDS = 2.0
TERMINAL_REFRESH_SECONDS = 1.0
LOG_INTERVAL_SECONDS = 15.0
#: A log of this size is put aside when a server starts.
MAX_LOG_BYTES = 10 * 1024 * 1024
_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server of this machine, and the key that opens it."""

    url: str
    key: str = field(repr=False)


def with_local_server(config: Config, *, needs_worker: bool = True) -> Config:
    """The config; one that names neither a server nor a key gets those of this machine's server.

    That server is started if it does not run, which blocks for a second or two. Its worker starts
    with the first work if the caller does not need it.
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
    """The server of a home. Whoever asks while it is being started waits for the same one."""
    state = find_server(home)
    if state is None or (needs_worker and state.worker_wakeup is not None):
        home.create()
        progress = _StartProgress(f"tinkex: waiting for the local server in {home.root} to start")
        with _home_errors(home), contextlib.closing(progress), _exclusive_start(home, progress):
            state = _start_server(home, progress, needs_worker=needs_worker)
    # It could be about to stop because nobody asks: now somebody does.
    with contextlib.suppress(OSError):
        os.utime(home.activity_file)
    if state.version != package_version():
        logger.warning(
            "The local server at %s runs tinkex %s, this is %s; `tinkex serve stop` ends it, and "
            "the next client starts a new one",
            *(state.url, state.version, package_version()),
        )
    return LocalServer(state.url, _read_key(home))


def _read_key(home: Home) -> str:
    try:
        return home.key_file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the key of the local server is not in {home.key_file}",
            hint="Run `tinkex serve stop`: the next start makes a new key.",
        ) from error


# --- starting -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _home_errors(home: Home) -> Iterator[None]:
    """Say in a sentence that a home cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"a local server cannot be started in {home.root}: {error.strerror or error}",
            hint="Set TINKEX_HOME to a directory that you can write, or pass base_url=...",
        ) from error


@contextlib.contextmanager
def _exclusive_start(home: Home, progress: _StartProgress) -> Iterator[None]:
    """Be the only one who starts a server in this home."""
    with home.start_lock.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress.update()
                time.sleep(_POLL_SECONDS)
        yield


def _start_server(home: Home, progress: _StartProgress, *, needs_worker: bool) -> ServerState:
    """Start a server unless one runs, and the worker of one that runs without."""
    process: subprocess.Popen[bytes] | None = None
    before = 0
    ends_at = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        state = find_server(home)
        if state is not None and (state.worker_wakeup is None or not needs_worker):
            return state
        if state is not None:
            # Repeated until the worker runs, because a datagram may be lost.
            _wake_worker(state)
        elif process is None and not _is_home_locked(home):
            _check_installed(home)
            before = _log_size(home)
            process = _launch_process(home, needs_worker=needs_worker)
        # Somebody else's server may have the home already, and be about to answer.
        elif process and process.returncode is not None and find_lock_holder(home) is None:
            raise _start_error(home, before, f"ended with exit code {process.returncode}")
        if time.monotonic() > ends_at:
            raise _start_error(home, before, f"does not answer after {START_TIMEOUT_SECONDS:g} s")
        progress.update()
        time.sleep(_POLL_SECONDS)


def _is_home_locked(home: Home) -> bool:
    """Whether a server has the home: it is about to answer, or to end."""
    holder = find_lock_holder(home)
    return holder is not None and holder.is_alive


def _wake_worker(state: ServerState) -> None:
    """Ask a server to start its worker."""
    host, _, port = (state.worker_wakeup or "").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"look", (host, int(port)))


def _check_installed(home: Home) -> None:
    missing = missing_libraries("server", "torch")
    # A server with settings of its own knows itself whether it needs torch.
    is_special = home.config_file.exists() or bool(read_variables(["TINKEX_ENGINE"]))
    if not missing or (is_special and not missing_libraries("server")):
        return
    raise ConfigError(
        "no API key and no server were given, and a local server needs "
        f"{', '.join(missing)}, not installed here",
        hint=f"Run {install_command('server', 'torch')}, pass api_key=... or base_url=..., or set "
        "TINKER_API_KEY.",
    )


def _launch_process(home: Home, *, needs_worker: bool) -> subprocess.Popen[bytes]:
    """Start a server that outlives this process."""
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
    # Waits for its end, should that come before ours: a dead child that nobody waits for stays.
    threading.Thread(target=process.wait, name="tinkex-local-server", daemon=True).start()
    return process


def _log_size(home: Home) -> int:
    """The size of the log; a large one is put aside first."""
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
        said = file.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return ConfigError(
        "\n".join([f"the local server in {home.root} {reason}; its last words:", *said]),
        hint="Run `tinkex serve` to see more, or name another server with base_url=...",
    )


class _StartProgress:
    """Reports on stderr what takes long: one line that changes on a terminal, else a few lines."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._started_at = time.monotonic()
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._next_update_at = self._started_at + PROGRESS_DELAY_SECONDS
        self._has_line = False

    def update(self) -> None:
        """Report how long it has taken so far, if that is due."""
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
