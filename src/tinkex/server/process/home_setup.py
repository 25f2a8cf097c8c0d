"""One server per home: a lock that the kernel gives back, however its holders end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path

from tinkex import clock
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.logs import get_logger
from tinkex.server.config import DEFAULT_TENANT, ServerConfig, is_loopback
from tinkex.server_discovery import LockHolder, read_state
from tinkex.store import keys
from tinkex.store.database import Connection, Database
from tinkex.store.settings import get_or_create_store_id
from tinkex.system.atomic import write_file_atomic

#: How long the processes of a server that was killed may take to notice.
ORPHAN_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.05
#: How the modules begin that a supervisor starts as processes.
_MODULE_PREFIX = b"tinkex.server."
LOG = get_logger(__name__)


class HomeLock:
    """A home that is ours until every process that holds the descriptor is gone."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def acquire(cls, home: Home) -> HomeLock:
        """Take a home, or say who has it."""
        home.create()
        descriptor = os.open(home.server_lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _wait_for_lock(descriptor, home)
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, LockHolder.current().encode(), 0)
        return cls(descriptor)

    def is_lock_of(self, home: Home) -> bool:
        """Whether the file that we locked is still the home's: not removed, not replaced."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), home.server_lock.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            # A disk that does not answer says nothing about the file.
            return True

    def release(self) -> None:
        """Give the home back, as far as this process is concerned."""
        os.close(self.descriptor)


def _wait_for_lock(descriptor: int, home: Home) -> None:
    ends_at = time.monotonic() + ORPHAN_WAIT_SECONDS
    has_ended_orphans = False
    while not _try_lock(descriptor):
        holder = LockHolder.parse(os.pread(descriptor, 64, 0))
        if holder is not None and holder.is_alive:
            raise _home_in_use_error(home, holder)
        # The children of a killed supervisor hold the lock until they notice.
        if time.monotonic() > ends_at:
            if has_ended_orphans or not _kill_orphans(descriptor):
                raise _home_in_use_error(home, holder)
            has_ended_orphans = True
            ends_at = time.monotonic() + ORPHAN_WAIT_SECONDS
        time.sleep(_POLL_SECONDS)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _kill_orphans(descriptor: int) -> bool:
    """End the processes of a dead supervisor that did not notice; False if there are none here."""
    locked = os.fstat(descriptor)
    orphans = [pid for pid in _list_server_pids() if _has_open(pid, locked)]
    for pid in orphans:
        LOG.warning("process %d of a server that is gone still runs and is ended by force", pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(orphans)


def _list_server_pids() -> list[int]:
    """The processes of servers on this machine, as far as the system says."""
    found: list[int] = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (directory / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(_MODULE_PREFIX) for word in words):
                found.append(int(directory.name))
    return [pid for pid in found if pid != os.getpid()]


def _has_open(pid: int, file: os.stat_result) -> bool:
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False
    return any(_is_same_file(descriptor, file) for descriptor in descriptors)


def _is_same_file(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), file)
    except OSError:
        return False


def _home_in_use_error(home: Home, holder: LockHolder | None) -> ConfigError:
    state = read_state(home)
    if holder is not None and not holder.is_alive:
        return ConfigError(
            f"{home.root} is locked by a server that this machine does not show; its pid was "
            f"{holder.pid}",
            hint="It may run in another container or on another machine: stop it there.",
        )
    where = f" at {state.url}" if state is not None and holder and state.pid == holder.pid else ""
    who = f" with pid {holder.pid}" if holder is not None else ""
    return ConfigError(
        f"a server{who} runs in {home.root} already{where}",
        hint="Use that one, stop it with `tinkex serve stop`, or pass another --home.",
    )


def bind_home_to_store(home: Home, database: Database) -> None:
    """Note which store a home belongs to, or refuse to serve it with another."""
    found = database.write(get_or_create_store_id)
    try:
        known = home.store_id_file.read_text("ascii").strip()
    except FileNotFoundError:
        write_file_atomic(home.store_id_file, f"{found}\n".encode())
        return
    if known != found:
        raise ConfigError(
            f"the checkpoints in {home.root} belong to another store than this one, which would "
            "remove them",
            hint="Name their store with --store, or another --home; remove "
            f"{home.store_id_file} only to give them up.",
        )


#: Whose the first keys are.


def ensure_keys(config: ServerConfig, home: Home, database: Database) -> None:
    """Make sure that the home's owner has a key, and refuse the network a server without one."""
    if config.api_key:
        database.write(lambda db: _insert_key(db, config.api_key, "told at start"))
    if not is_loopback(config.host) and not database.read(keys.has_keys):
        raise ConfigError(
            f"host is {config.host!r}, which others can reach, and no key protects the server",
            hint="Run `tinkex key create` first, or pass --api-key.",
        )
    secret = _read_key_file(home)
    if secret is not None and database.read(lambda db: keys.find_by_secret(db, secret)) is not None:
        return
    fresh = keys.generate_key()
    database.write(lambda db: _insert_key(db, fresh, "home"))
    write_file_atomic(home.key_file, fresh.encode() + b"\n", mode=0o600)
    LOG.info("a key of the tenant %r is in %s", DEFAULT_TENANT, home.key_file)


def _insert_key(db: Connection, secret: str, name: str) -> None:
    now = clock.now()
    tenant = keys.get_or_create_tenant(db, DEFAULT_TENANT, now)
    keys.insert_key(db, tenant.id, secret, name=name, now=now)


def _read_key_file(home: Home) -> str | None:
    try:
        return home.key_file.read_text("ascii").strip() or None
    except (FileNotFoundError, UnicodeDecodeError):
        return None
