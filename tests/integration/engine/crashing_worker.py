"""Workers with a real engine that kill themselves at a configured point.

`python -m tests.integration.engine.crashing_worker FOLDER` reads the settings of one worker per
line and prints where and how it ended. Importing torch and loading the base model takes seconds, so
that is done once: each worker is a fork, which has no adapter, store or thread yet.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from tests.integration.jobs.conftest import BASE_MODEL
from tests.integration.jobs.crashing_worker import CrashingDatabase
from tinkex.engine.config import EngineConfig
from tinkex.engine.protocol import AdapterSpec, PassRun
from tinkex.engine.torch_engine import TorchEngine
from tinkex.home import Home
from tinkex.jobs.snapshots import SnapshotPolicy
from tinkex.jobs.worker import Worker
from tinkex.jobs.worker_config import WorkerConfig
from tinkex.store.database import Database
from tinkex.store.schema import jobs

#: Every verb of the engine that takes any time.
VERBS = (
    "create",
    "start_passes",
    "optim_step",
    "save",
    "load",
    "snapshot",
    "restore",
    "start_sample",
    "step_samples",
)
COMMITS = ("before", "after")
#: The maximum number of engine calls of a worker, without those for samples.
MAX_VERBS = 14


class CrashPoint(NamedTuple):
    """When a worker dies: inside a method of its engine, or around a commit."""

    where: str
    num_calls_before_crash: int
    """The number of calls that succeed before."""
    num_calls: int
    """Calls and returns in the method before the crash, which is at its end at the latest."""


class WorkerSpec(NamedTuple):
    """The settings of a worker and of its crash."""

    root: str
    is_deterministic: bool
    crash_point: CrashPoint
    adapter_bytes: int = 0
    """The memory for models in training; 0 is more than they need."""


class CrashingEngine(TorchEngine):
    """Serves one tiny model, and crashes as configured."""

    crash_point: CrashPoint | None = None
    _num_calls: Counter[str]

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in VERBS or self.crash_point is None:
            return found
        self._num_calls[name] += 1
        is_here = (
            name == self.crash_point.where
            and self._num_calls[name] > self.crash_point.num_calls_before_crash
        )
        if not is_here and sum(self._num_calls[verb] for verb in VERBS[:-2]) < MAX_VERBS:
            return found
        crash = partial(_crash_in, name, self.crash_point.num_calls)
        if name == "snapshot":
            # The state is copied here and written by another thread, which takes longer.
            return lambda adapter_id: partial(crash, found(adapter_id))
        if name == "start_passes":
            return lambda passes: _CrashingRun(found(passes), crash)
        return partial(crash, found)


class _CrashingRun:
    """Passes that crash after their first micro-batch."""

    num_tokens = 0

    def __init__(self, run: PassRun, crash: Callable[..., None]) -> None:
        self.step = partial(crash, run.step)
        self.cancel = run.cancel


def _crash_in(
    name: str, num_calls: int, work: Callable[..., object], *args: object, **options: object
) -> None:
    numbers = count()

    def count_call(*_: object) -> None:
        if next(numbers) >= num_calls:
            _kill_self(name)

    sys.setprofile(count_call)
    work(*args, **options)
    _kill_self(name)


def _kill_self(name: str) -> None:
    sys.setprofile(None)
    os.write(sys.stdout.fileno(), f"{name} ".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def worker_config() -> WorkerConfig:
    """A worker that always retries and often writes snapshots."""
    return WorkerConfig(
        # Jobs must not fail because of the crashes.
        max_attempts=1_000_000,
        owner="test",
        snapshots=SnapshotPolicy(max_changes=4),
    )


def run_worker(root: Path, engine: CrashingEngine, crash_point: CrashPoint) -> None:
    """Work until everything is done, or the worker crashes."""
    database = CrashingDatabase(f"sqlite:///{root / 'store.db'}")
    if crash_point.where in COMMITS:
        database.where, database.commits_before_crash = (
            crash_point.where,
            1 + crash_point.num_calls_before_crash,
        )
    engine.crash_point, engine._num_calls = crash_point, Counter()
    worker = Worker(database=database, engine=engine, home=Home(root), config=worker_config())
    threading.Thread(target=_stop_when_idle, args=(worker, root), daemon=True).start()
    worker.run()
    database.close()


def _stop_when_idle(worker: Worker, root: Path) -> None:
    database = Database(f"sqlite:///{root / 'store.db'}")
    waiting = sa.select(sa.func.count()).where(jobs.c.finished_at.is_(None))
    while database.read(lambda db: db.scalar(waiting)):
        time.sleep(0.02)
    database.close()
    worker.stop()


def new_engine(folder: str, is_deterministic: bool) -> CrashingEngine:
    """An engine that has loaded its base model."""
    config = EngineConfig(threads=1, is_deterministic=is_deterministic)
    engine = CrashingEngine({BASE_MODEL: folder}, config)
    engine.create("first", AdapterSpec(base_model=BASE_MODEL, rank=1, seed=0))
    engine.drop("first")
    return engine


def main() -> None:
    engines = {is_it: new_engine(sys.argv[1], is_it) for is_it in (True, False)}
    for line in sys.stdin:
        root, is_deterministic, crash_point, adapter_bytes = json.loads(line)
        child = os.fork()
        if child == 0:
            engine = engines[is_deterministic]
            engine._config = replace(engine._config, adapter_bytes=adapter_bytes)
            run_worker(Path(root), engine, CrashPoint(*crash_point))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
