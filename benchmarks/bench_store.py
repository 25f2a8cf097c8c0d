"""The store: jobs per second with several writers, with one lock for all and with narrower ones.

Every writer is a process that does what an API process and the worker of one group do: it submits
training operations and samples, starts them, stores fake results and marks them as fetched. The
figures are those of a PostgreSQL server on this machine. `--baseline SRC` compares the jobs per
second on SQLite with those of another source tree, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psycopg

from benchmarks import Row, at_least, at_most
from tests.support.postgres import PostgresServer

NUM_WRITERS = (1, 2, 4, 8)
SECONDS, NUM_ROUNDS = 5.0, 3
#: Jobs that a writer submits together, half of them samples.
BATCH_SIZE = 8
PAYLOAD, RESULT = b"p" * 2000, b"r" * 400
#: Unlike the server for tests, this one writes everything to disk.
DURABLE = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "128MB"}
_ROW_VERSIONS = "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables"


# --- a writer ----------------------------------------------------------------------------------
def write_jobs(url: str, group_id: str, locks: str, seconds: float) -> dict[str, float]:
    """Write jobs for some seconds; returns their number and the latencies of the submits."""
    from tinkex.jobs.queue import JobQueue, QueueLimits
    from tinkex.jobs.result_log import ResultLog
    from tinkex.store.database import Database

    class SerialDatabase(Database):
        """All writers exclude each other."""

        def write_soon(self, work: Any, locks: object = None) -> Any:
            return super().write_soon(work)

    kind = SerialDatabase if locks == "global" else Database
    with ExitStack() as stack:
        database = stack.enter_context(closing(kind(url)))
        writer = _Writer(database, group_id)
        queue = stack.enter_context(closing(JobQueue(database, QueueLimits(), b"secret")))
        log = ResultLog(database, writer.epoch, lease=writer.lease, group_id=group_id)
        stack.callback(log.close)
        print("ready", flush=True)
        sys.stdin.readline()
        deadline, latencies, num_jobs = time.perf_counter() + seconds, list[float](), 0
        cpu_seconds = -time.process_time()
        while time.perf_counter() < deadline:
            latencies += writer.run_batch(queue, log)
            num_jobs += BATCH_SIZE
        cpu_seconds += time.process_time()
    cuts = quantiles(latencies, n=100)
    return {
        "num_jobs": num_jobs,
        "cpu": 1000 * cpu_seconds / num_jobs,
        "p50": 1000 * cuts[49],
        "p99": 1000 * cuts[98],
    }


class _Writer:
    """One model and one sampling session of one group."""

    def __init__(self, database: Any, group_id: str) -> None:
        from tests.support.store_rows import add_run, add_sampler, add_session, add_tenant
        from tinkex.jobs.lease import group_lease
        from tinkex.store import coordination

        self.session = add_session(database, add_tenant(database, group_id))
        self.run = add_run(database, self.session, group_id=group_id)
        self.sampler = add_sampler(database, self.session)
        self.lease = group_lease(group_id)
        self.epoch = database.write(
            lambda db: coordination.acquire_lease(db, self.lease, group_id, until=1.0)
        )
        self._position = 0

    def run_batch(self, queue: Any, log: Any) -> list[float]:
        """Run a batch of jobs from submit to fetch; returns the latencies of the submits."""
        started, latencies = time.perf_counter(), []
        submitted = [queue.submit(self._new_job(number % 2 == 0)) for number in range(BATCH_SIZE)]
        stored = []
        for future in submitted:
            stored.append(future.result(60))
            latencies.append(time.perf_counter() - started)
        log.start([job.id for job in stored])
        log.finish([self._entry(job) for job in stored])
        log.flush()
        for job in stored:
            queue.find_with_result(self.session.tenant_id, job.id)
        queue.mark_fetched([job.id for job in stored])
        return latencies

    def _new_job(self, is_sample: bool) -> Any:
        from tests.support.store_rows import new_job
        from tinkex.jobs.job_types import JobKind

        self._position += 1
        place = (
            {"kind": JobKind.SAMPLE, "sampler_id": self.sampler.id}
            if is_sample
            else {"kind": JobKind.FORWARD_BACKWARD, "run_id": self.run.id}
        )
        key = f"{self.run.id}:{self._position}"
        return new_job(
            self.session, id="", key=key, position=self._position, payload=PAYLOAD, **place
        )

    def _entry(self, job: Any) -> Any:
        from tinkex.jobs.job_types import Completed
        from tinkex.jobs.result_log import ResultEntry, count_usage

        kinds = ("training",) if job.run_id else ("prefill", "prefill_cached", "sample")
        effects = tuple(
            count_usage(job, run_id=job.run_id or "", base_model="m", kind=kind, amount=10)
            for kind in kinds
        )
        outcome = Completed(result=RESULT, num_tokens=30, metrics={"loss": 1.0}, effects=effects)
        return ResultEntry(job, outcome, self._position if job.run_id else None, job.created_at)


# --- measuring -----------------------------------------------------------------------------------
def run_writers(
    url: str, num_writers: int, locks: str, seconds: float, source: str = ""
) -> dict[str, float]:
    """Run writers at the same time; returns jobs per second of all, and the worst latencies."""
    env = os.environ | ({"PYTHONPATH": os.pathsep.join([source, "."])} if source else {})
    arguments = [url, locks, str(seconds)]
    command = [sys.executable, "-m", "benchmarks.bench_store", *arguments]
    writers = [
        subprocess.Popen(
            [*command, f"group-{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for number in range(num_writers)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    found = [json.loads(writer.communicate(timeout=seconds + 300)[0]) for writer in writers]
    return {
        "rate": sum(each["num_jobs"] for each in found) / seconds,
        "cpu": max(each["cpu"] for each in found),
        "p50": max(each["p50"] for each in found),
        "p99": max(each["p99"] for each in found),
    }


def measure_postgresql(seconds: float, num_rounds: int) -> list[Row]:
    """Compare the locks with 1, 2, 4 and 8 writers, and count row versions and bytes of log."""
    rows = []
    server = PostgresServer(**DURABLE)
    try:
        for num_writers in NUM_WRITERS:
            found: dict[str, list[dict[str, float]]] = {"global": [], "narrow": []}
            for locks in [*found] * num_rounds:
                found[locks].append(_measure_once(server, num_writers, locks, seconds))
            rows += _compare(num_writers, *found.values())
    finally:
        server.stop()
    return rows


def _measure_once(
    server: PostgresServer, num_writers: int, locks: str, seconds: float
) -> dict[str, float]:
    from tinkex.store.database import Database
    from tinkex.store.migrations import migrate

    url = server.create_database()
    with closing(Database(url)) as database:
        migrate(database)
    with psycopg.connect(url, autocommit=True) as db:
        before = db.execute("SELECT pg_current_wal_lsn()").fetchone()
        found = run_writers(url, num_writers, locks, seconds)
        num_jobs = found["rate"] * seconds
        written = db.execute("SELECT pg_current_wal_lsn() - %s::pg_lsn", before).fetchone()
        versions = db.execute(_ROW_VERSIONS).fetchone()
        assert written and versions
    server.drop_database(url)
    return found | {
        "wal_bytes": float(written[0]) / num_jobs,
        "row_versions": float(versions[0] or 0) / num_jobs,
    }


def _compare(
    num_writers: int, serial: list[dict[str, float]], narrow: list[dict[str, float]]
) -> list[Row]:
    def of(found: list[dict[str, float]], name: str) -> float:
        return median(each[name] for each in found)

    names = f"{num_writers} writer{'s' if num_writers > 1 else ''}"
    return [
        at_least(f"{names}: jobs/s : with one lock", of(narrow, "rate"), of(serial, "rate"), "/s"),
        *(
            at_most(f"{names}: submit {name}", of(narrow, name), of(serial, name), "ms")
            for name in ("p50", "p99")
        ),
        at_most(f"{names}: log per job", of(narrow, "wal_bytes"), of(serial, "wal_bytes"), "B"),
        at_most(
            f"{names}: row versions per job",
            of(narrow, "row_versions"),
            of(serial, "row_versions"),
            "",
        ),
    ]


def measure_sqlite(seconds: float, num_rounds: int, baseline: str) -> list[Row]:
    """Compare the jobs per second and the CPU of one writer on SQLite with another tree."""
    found: dict[str, list[dict[str, float]]] = {"": [], baseline: []}
    with tempfile.TemporaryDirectory() as directory:
        for number, source in enumerate([*found] * num_rounds):
            url = f"sqlite:///{Path(directory) / f'{number}.db'}"
            found[source].append(run_writers(url, 1, "narrow", seconds, source))
    rate, cpu = (
        [median(run[name] for run in runs) for runs in found.values()] for name in ("rate", "cpu")
    )
    return [
        at_least("SQLite: jobs/s : of the other tree", *rate, "/s", 0.99),
        at_most("SQLite: CPU per job : of the other tree", *cpu, "ms", 1.01),
    ]


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks store", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--baseline", metavar="SRC", help="source tree to compare on SQLite")
    asked = parser.parse_args(list(options))
    seconds, num_rounds = (1.5, 1) if asked.quick else (SECONDS, NUM_ROUNDS)
    if asked.baseline:
        return measure_sqlite(seconds, num_rounds, asked.baseline)
    return measure_postgresql(seconds, num_rounds)


if __name__ == "__main__":
    from tinkex.store.database import Database
    from tinkex.store.migrations import migrate

    store_url, lock_name, duration, group = sys.argv[1:]
    with closing(Database(store_url)) as opened:
        migrate(opened)
    print(json.dumps(write_jobs(store_url, group, lock_name, float(duration))))
