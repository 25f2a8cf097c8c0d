"""The worker on demand: when it is needed, and how the placeholder notices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.conftest import eventually
from tests.support.resources import create_checkpoint, create_ready_model
from tests.support.server_harness import ServerHarness, open_harness
from tests.support.store_rows import add_session, add_tenant, new_job
from tinkex import clock
from tinkex.jobs.wakeup import WakeupListener, WakeupSender
from tinkex.server.config import ServerConfig
from tinkex.server.process import worker_on_demand
from tinkex.server.process.worker_on_demand import open_worker_placeholder
from tinkex.server.wiring import open_store, open_worker
from tinkex.store import coordination, jobs, sessions
from tinkex.store.database import Database


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return ServerConfig(home=tmp_path, engine="fake")


@pytest.fixture
def database(config: ServerConfig) -> Iterator[Database]:
    """The store of a server whose worker has run before."""
    with open_store(config) as database:
        with open_worker(config) as worker:
            worker.stop()
            worker.run()
        yield database


def add_job(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    database.write(lambda db: jobs.insert(db, new_job(session), clock.now()))


def send_wakeup(database: Database) -> None:
    with contextlib.closing(WakeupSender(database, "worker")) as sender:
        sender.notify()


def test_worker_not_needed_without_jobs(config: ServerConfig, database: Database) -> None:
    stand_in = open_worker_placeholder(config)
    assert stand_in is not None
    stand_in.close()
    # Closing twice is allowed: at shutdown it may already be closed.
    stand_in.close()
    assert (
        database.read(lambda db: coordination.list_alive_processes(db, "worker", since=0.0)) == []
    )


def test_worker_needed_for_new_store_pending_job_or_changed_models(
    config: ServerConfig, database: Database, tmp_path: Path
) -> None:
    assert open_worker_placeholder(replace(config, models=("tinkex/other",))) is None
    assert open_worker_placeholder(replace(config, engine="local")) is None
    add_job(database)
    assert open_worker_placeholder(config) is None
    new = replace(config, home=tmp_path / "new")
    with open_store(new):
        assert open_worker_placeholder(new) is None


@pytest.mark.asyncio
@pytest.mark.parametrize("tell", [send_wakeup, add_job])
async def test_wakeup_or_polled_job_ends_wait(
    config: ServerConfig,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    tell: Callable[[Database], None],
) -> None:
    monkeypatch.setattr(worker_on_demand, "POLL_SECONDS", 0.01)
    stand_in = open_worker_placeholder(config)
    assert stand_in is not None
    with contextlib.closing(stand_in):
        waiting = asyncio.create_task(stand_in.wait_for_work())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await asyncio.to_thread(tell, database)
        async with asyncio.timeout(60):
            await waiting


def test_sessions_expire_without_worker(
    config: ServerConfig, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_on_demand, "POLL_SECONDS", 0.01)
    session = add_session(database, add_tenant(database), seen_at=time.time() - 1000.0)
    stand_in = open_worker_placeholder(config)
    assert stand_in is not None

    def has_expired() -> bool:
        record = database.read(lambda db: sessions.find(db, session.id))
        return record is not None and record.expired_at is not None

    with contextlib.closing(stand_in):
        eventually(has_expired)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ServerHarness]:
    with open_harness(tmp_path / "house") as harness:
        yield harness


def test_deleted_checkpoint_requires_worker(harness: ServerHarness) -> None:
    with contextlib.closing(WakeupListener(harness.services.database, "worker")) as listener:
        run_id = create_ready_model(harness, harness.session())
        assert listener.wait(30.0) == ["+1"]  # for the job that creates the model
        checkpoint = create_checkpoint(harness, run_id)
        path = f"/training_runs/{run_id}/checkpoints/{checkpoint.segment}/{checkpoint.name}"
        assert harness.send_request("DELETE", path).status_code == 200
        assert listener.wait(30.0) == ["look"]
