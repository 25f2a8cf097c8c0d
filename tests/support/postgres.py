"""A temporary PostgreSQL server on a free loopback port."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg

from tests.support.ports import free_port

#: Debian's PostgreSQL programs, one directory per version.
_DEBIAN = Path("/usr/lib/postgresql")
_START_SECONDS = 60.0
#: The data is temporary, so nothing must be flushed to disk.
_OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "60",
    "shared_buffers": "16MB",
}
#: Waits until each has ended: it may hold locks.
_CLOSE_OTHERS = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


class PostgresServer:
    """A server that runs until `stop` is called; `settings` replace those for tests."""

    def __init__(self, **settings: str) -> None:
        self._settings = _OPTIONS | settings
        self._programs = find_programs()
        self._account = _account()
        self._directory = Path(tempfile.mkdtemp(prefix="tinkex-postgres-"))
        if "user" in self._account:
            os.chown(self._directory, self._account["user"], self._account["group"])
        self._numbers = itertools.count()
        self._empty: list[str] = []
        try:
            self._make_cluster()
            self._process, self._port = self._start()
        except BaseException:
            shutil.rmtree(self._directory)
            raise

    def create_database(self) -> str:
        """Return the URL of an empty database."""
        if self._empty:
            return self._empty.pop()
        name = f"store_{next(self._numbers)}"
        with psycopg.connect(self._address("postgres"), autocommit=True) as db:
            db.execute(f'CREATE DATABASE "{name}"')
        return self._address(name)

    def drop_database(self, url: str) -> None:
        """Close all connections to a database and empty it for the next caller.

        Emptying takes a tenth of the time of creating and dropping a database.
        """
        with psycopg.connect(url, autocommit=True) as db:
            db.execute(_CLOSE_OTHERS)
            db.execute("DROP SCHEMA public CASCADE")
            db.execute("CREATE SCHEMA public")
        self._empty.append(url)

    def crash(self) -> None:
        """End the server immediately, without a checkpoint, as after a power failure."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(timeout=_START_SECONDS)

    def restart(self) -> None:
        """Crash the server and start it again on the same port."""
        self.crash()
        self._process = self._launch(self._port)
        if not self._is_up(self._process, self._port):
            raise RuntimeError(f"PostgreSQL did not restart: {self._directory / 'log'}")

    def shut_down(self) -> None:
        """Stop the server as an operator would; its data stays for `start_again`."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=_START_SECONDS)

    def start_again(self) -> None:
        """Start the server on the same port after `shut_down`."""
        self._process = self._launch(self._port)
        if not self._is_up(self._process, self._port):
            raise RuntimeError("PostgreSQL did not start again")

    def stop(self) -> None:
        """Stop the server and delete its files."""
        self.crash()
        shutil.rmtree(self._directory)

    def _address(self, name: str) -> str:
        return f"postgresql://tinkex@127.0.0.1:{self._port}/{name}"

    def _make_cluster(self) -> None:
        command = [
            self._programs / "initdb",
            f"--pgdata={self._directory / 'data'}",
            "--username=tinkex",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        ]
        made = subprocess.run(
            command, capture_output=True, text=True, cwd=self._directory, **self._account
        )
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr}")

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        # Another process may take the port before the server does; then try the next one.
        for _ in range(5):
            port = free_port()
            process = self._launch(port)
            if self._is_up(process, port):
                return process, port
        raise RuntimeError(f"PostgreSQL did not start: {(self._directory / 'log').read_text()}")

    def _launch(self, port: int) -> subprocess.Popen[bytes]:
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        command = [self._programs / "postgres", "-D", self._directory / "data", f"--port={port}"]
        with (self._directory / "log").open("ab") as log:
            return subprocess.Popen(
                [*command, *settings], stdout=log, stderr=log, cwd=self._directory, **self._account
            )

    def _is_up(self, process: subprocess.Popen[bytes], port: int) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            try:
                psycopg.connect(f"postgresql://tinkex@127.0.0.1:{port}/postgres").close()
            except psycopg.OperationalError:
                time.sleep(0.05)
            else:
                return True
        process.kill()
        process.wait()
        return False


def find_programs() -> Path:
    """Return the directory of the PostgreSQL programs: Debian's newest, or the one on the PATH."""
    versions = [path for path in _DEBIAN.glob("*/bin") if (path / "initdb").exists()]
    if versions:
        return max(versions, key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    if on_path is None:
        raise RuntimeError(
            "PostgreSQL's initdb is not installed; run scripts/system-packages.sh, "
            "or apt-get install postgresql"
        )
    return Path(on_path).resolve().parent


def _account() -> dict[str, Any]:
    """Return the user of the server process; PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
