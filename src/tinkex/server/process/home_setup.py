"""Preparation of a home: exclusive lock, link to its store, and the first API key."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tinkex import clock
from tinkex.checkpoint.blob_cache import BlobCache
from tinkex.checkpoint.places import STORE_ID_KEY, BlobsUnavailable
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.logs import get_logger
from tinkex.server.config import DEFAULT_TENANT, ServerConfig
from tinkex.server_discovery import LockHolder, read_state
from tinkex.store import keys
from tinkex.store.database import Connection, Database
from tinkex.store.settings import get_blobs_url, get_or_create_store_id, set_blobs_url
from tinkex.system.addresses import is_loopback
from tinkex.system.atomic import write_file_atomic
from tinkex.system.locks import lock_descriptor

#: Time for the child processes of a killed supervisor to notice and exit.
ORPHAN_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.05
#: Prefix of the modules that a supervisor runs as processes.
_MODULE_PREFIX = b"tinkex.server."
LOG = get_logger(__name__)
BLOBS_HINT = (
    "Check the bucket, its free space, and the credentials and the endpoint in the environment, "
    "such as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL."
)


class HomeLock:
    """An exclusive lock on a home; the kernel releases it when its last holder exits."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def acquire(cls, home: Home) -> HomeLock:
        """Lock a home; raises ConfigError that names the current holder."""
        home.create()
        descriptor = os.open(home.server_lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _wait_for_lock(descriptor, home)
        except BaseException:  # also on Ctrl-C during the wait
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, LockHolder.current().encode(), 0)
        return cls(descriptor)

    def is_lock_of(self, home: Home) -> bool:
        """Whether the locked file is still in the home: not removed, not replaced."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), home.server_lock.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            # An I/O error does not mean that the file was removed.
            return True

    def release(self) -> None:
        """Release this process's hold on the lock."""
        os.close(self.descriptor)


def _wait_for_lock(descriptor: int, home: Home) -> None:
    deadline = time.monotonic() + ORPHAN_WAIT_SECONDS
    has_killed_orphans = False
    while not lock_descriptor(descriptor):
        holder = LockHolder.parse(os.pread(descriptor, 64, 0))
        if holder is not None and holder.is_alive:
            raise _home_in_use_error(home, holder)
        # The children of a killed supervisor hold the lock until they notice and exit.
        if time.monotonic() > deadline:
            if has_killed_orphans or not _kill_orphans(descriptor):
                raise _home_in_use_error(home, holder)
            has_killed_orphans = True
            deadline = time.monotonic() + ORPHAN_WAIT_SECONDS
        time.sleep(_POLL_SECONDS)


def _kill_orphans(descriptor: int) -> bool:
    """Kill processes that outlived their supervisor; False if this machine has none."""
    locked = os.fstat(descriptor)
    orphans = [pid for pid in _list_server_pids() if _has_open(pid, locked)]
    for pid in orphans:
        LOG.warning("killing process %d, which outlived its server", pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(orphans)


def _list_server_pids() -> list[int]:
    """Pids of the server processes on this machine that /proc shows."""
    pids: list[int] = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (directory / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(_MODULE_PREFIX) for word in words):
                pids.append(int(directory.name))
    return [pid for pid in pids if pid != os.getpid()]


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
            f"{home.root} is locked by a server that is not visible on this machine; its pid was "
            f"{holder.pid}",
            hint="It may run in another container or on another machine; stop it there.",
        )
    where = f" at {state.url}" if state is not None and holder and state.pid == holder.pid else ""
    who = f" with pid {holder.pid}" if holder is not None else ""
    return ConfigError(
        f"a server{who} is already running in {home.root}{where}",
        hint="Use that one, stop it with `tinkex serve stop`, or pass another --home.",
    )


def bind_home_to_store(home: Home, database: Database) -> None:
    """Record the id of the home's store, or raise if the home belongs to another store."""
    store_id = database.write(get_or_create_store_id)
    try:
        recorded_id = home.store_id_file.read_text("ascii").strip()
    except FileNotFoundError:
        write_file_atomic(home.store_id_file, f"{store_id}\n".encode())
        return
    if recorded_id != store_id:
        raise ConfigError(
            f"the checkpoints in {home.root} belong to another store; serving them with this one "
            "would remove them",
            hint="Pass their store with --store, or another --home. Remove "
            f"{home.store_id_file} only if you no longer need the checkpoints.",
        )


def bind_blobs_to_store(blobs: BlobCache | None, database: Database) -> None:
    """Record which store the objects belong to, and where the objects of the store are.

    Raises ConfigError if the object store cannot be used, or if one belongs to another.
    """
    recorded_url = database.read(get_blobs_url)
    if blobs is None:
        if recorded_url:
            raise ConfigError(
                f"the checkpoints of this store are in {recorded_url}, but blobs is not set",
                hint=f"Pass --blobs {recorded_url}.",
            )
        return
    url, store_id = blobs.store.url, database.write(get_or_create_store_id)
    try:
        blobs.store.write_probe()
        if not recorded_url:
            blobs.store.create(STORE_ID_KEY, store_id.encode())
        owner_id = blobs.store.read(STORE_ID_KEY).decode("ascii", "replace")
    except BlobsUnavailable as error:
        hint = BLOBS_HINT
        if recorded_url not in {"", url}:
            hint = f"The objects of this store are in {recorded_url}: pass that, or copy them."
        raise ConfigError(f"cannot use blobs {url}: {error.message}", hint=hint) from error
    if owner_id != store_id:
        raise ConfigError(
            f"the objects in {url} belong to another store; serving them with this one would "
            "remove them",
            hint="Pass another prefix with --blobs, or the store of these objects with --store.",
        )
    database.write(lambda db: set_blobs_url(db, url))


def ensure_keys(config: ServerConfig, home: Home, database: Database) -> None:
    """Ensure that the key file holds a valid key; raise if a public server would have no key."""
    if config.api_key:
        database.write(lambda db: _insert_key(db, config.api_key, "set at startup"))
    if not is_loopback(config.host) and not database.read(keys.has_keys):
        raise ConfigError(
            f"host {config.host!r} is reachable from other machines, but the server has no API key",
            hint="Run `tinkex key create` first, or pass --api-key.",
        )
    secret = _read_key_file(home)
    if secret is not None and database.read(lambda db: keys.find_by_secret(db, secret)) is not None:
        return
    fresh = keys.generate_key()
    database.write(lambda db: _insert_key(db, fresh, "home"))
    write_file_atomic(home.key_file, fresh.encode() + b"\n", mode=0o600)
    LOG.info("wrote an API key of the tenant %r to %s", DEFAULT_TENANT, home.key_file)


def _insert_key(db: Connection, secret: str, name: str) -> None:
    now = clock.now()
    tenant = keys.get_or_create_tenant(db, DEFAULT_TENANT, now)
    keys.insert_key(db, tenant.id, secret, name=name, now=now)


def _read_key_file(home: Home) -> str | None:
    try:
        return home.key_file.read_text("ascii").strip() or None
    except (FileNotFoundError, UnicodeDecodeError):
        return None
