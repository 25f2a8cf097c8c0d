"""Processes that write to a store until they are killed.

Run as a program, with the URL of a store, this is their nursery: it has imported everything and
forks writers on demand, so that a new one is there within milliseconds. It obeys `start NAME COUNT`
and `bury NAME`, and says `pid NAME NUMBER` and `gone NAME`; writers say `ack NAME JOB` when a job
is on disk, and `stop NAME REASON` when they end.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import IO

import sqlalchemy as sa

from tests.support.store_rows import NOW, make_step, new_job
from tinkex.errors import StoreError
from tinkex.store import jobs, keys, sessions, steps
from tinkex.store.database import Database
from tinkex.store.records import JobRecord, SessionRecord

#: Writes that a writer has under way at once.
IN_FLIGHT = 8


@contextmanager
def writer_pool(url: str, *, max_file_bytes: int | None = None) -> Iterator[WriterPool]:
    """Yield a pool of writers to this store, stopped at the end of the block."""
    command = [sys.executable, "-m", "tests.integration.store.writer_pool", url]
    if max_file_bytes is not None:
        command.append(str(max_file_bytes))
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield WriterPool(process.stdin, process.stdout)
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


class WriterPool:
    """Controls the writer processes through pipes."""

    def __init__(self, orders: IO[str], news: IO[str]) -> None:
        self._commands = orders
        self._news = news

    def start(self, name: str, count: int) -> None:
        """Start a writer of this name that writes a number of jobs."""
        print("start", name, count, file=self._commands, flush=True)

    def await_exit(self, name: str) -> None:
        """Request a message when a killed writer has ended."""
        print("bury", name, file=self._commands, flush=True)

    def read_event(self) -> tuple[str, str, str]:
        """Return the next message: its kind, the writer, and the rest."""
        line = self._news.readline()
        assert line, "the nursery has ended"
        what, name, *rest = line.split(maxsplit=2)
        return what, name, "".join(rest).strip()


def session_of(db: sa.Connection) -> SessionRecord:
    """Return the session that all writers use."""
    tenant = keys.get_or_create_tenant(db, "writers", NOW)
    found = sessions.find(db, "session")
    if found is None:
        found = SessionRecord(
            id="session",
            tenant_id=tenant.id,
            project_id="default",
            display_name=None,
            tags=[],
            user_metadata={},
            sdk_version="1",
            created_at=NOW,
            seen_at=NOW,
        )
        sessions.insert(db, found)
    return found


def _write(db: sa.Connection, session: SessionRecord, key: str, payload: bytes) -> JobRecord | None:
    """Write a job and its step in one transaction."""
    job = jobs.insert(db, new_job(session, key=key, payload=payload), NOW)
    if job is not None:
        steps.insert(db, make_step(session, job_id=job.id))
    return job


def _run_writer(url: str, name: str, count: int) -> None:
    database = Database(url)
    session = database.write(session_of)
    rng = random.Random(name)
    # Writers with the same name prefix use the same keys.
    family = name.partition(".")[0]
    under_way: list[Future[JobRecord | None]] = []

    def acknowledge() -> None:
        job = under_way.pop(0).result()
        if job is not None:
            os.write(1, f"ack {name} {job.id}\n".encode())

    try:
        for place in range(count):
            payload = rng.randbytes(rng.choice((10, 1000, 50_000)))
            key = f"{family}:{place}"
            under_way.append(
                database.write_soon(
                    lambda db, key=key, payload=payload: _write(db, session, key, payload)
                )
            )
            if len(under_way) == IN_FLIGHT:
                acknowledge()
        while under_way:
            acknowledge()
    except StoreError as error:
        os.write(1, f"stop {name} {type(error).__name__}\n".encode())
    else:
        os.write(1, f"stop {name} done\n".encode())


def _fork_writer(url: str, name: str, count: int) -> int:
    pid = os.fork()
    if pid == 0:
        os.write(1, f"pid {name} {os.getpid()}\n".encode())
        _run_writer(url, name, count)
        os._exit(0)
    return pid


def main(url: str, max_file_bytes: str | None = None) -> None:
    """Execute the commands on standard input."""
    if max_file_bytes is not None:
        limit = int(max_file_bytes)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    names: dict[int, str] = {}
    for line in sys.stdin:
        match line.split():
            case ["start", name, count]:
                names[_fork_writer(url, name, int(count))] = name
            case ["bury", name]:
                [pid] = [pid for pid, known in names.items() if known == name]
                os.waitpid(pid, 0)
                del names[pid]
                os.write(1, f"gone {name}\n".encode())
    for pid in names:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
