"""A worker process that kills itself around its nth commit.

WHERE is `before` (the commit does not happen) or `after` (it happens, without a notification).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.jobs.conftest import BASE_MODEL
from tinkex.engine.fake.engine import FakeEngine
from tinkex.home import Home
from tinkex.jobs.snapshots import SnapshotPolicy
from tinkex.jobs.worker import Worker
from tinkex.jobs.worker_config import WorkerConfig
from tinkex.store.database import Connection, Database
from tinkex.store.write_locks import EXCLUSIVE, WriteLocks


class CrashingDatabase(Database):
    """Kills its process around a commit."""

    commits_before_crash = 0
    where = ""

    @contextmanager
    def begin(self, locks: WriteLocks = EXCLUSIVE) -> Iterator[Connection]:
        with super().begin(locks) as db:
            yield db
            self.commits_before_crash -= 1
            if self.where == "before" and self.commits_before_crash <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if self.where == "after" and self.commits_before_crash <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def work(root: Path, commits_before_crash: int, where: str) -> None:
    """Run jobs until all are finished or the crash."""
    database = CrashingDatabase(f"sqlite:///{root / 'store.db'}")
    database.commits_before_crash, database.where = commits_before_crash, where
    worker = Worker(
        database=database,
        engine=FakeEngine([BASE_MODEL]),
        home=Home(root),
        config=WorkerConfig(
            # The crashes are not caused by the jobs.
            max_attempts=1_000_000,
            owner="test",
            snapshots=SnapshotPolicy(max_changes=4),
        ),
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    worker.run()
    database.close()
