"""Wiring: errors of invalid stores, and heartbeats of a busy worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import eventually
from tinkex.errors import StoreError
from tinkex.jobs.wakeup import WakeupListener
from tinkex.server import wiring
from tinkex.server.config import ServerConfig
from tinkex.server.wiring import open_store, open_worker, redact_url
from tinkex.store import coordination
from tinkex.store.database import Database
from tinkex.store.records import ProcessRecord


@pytest.mark.parametrize("content", [b"no database at all" * 100, None])
def test_unusable_store_error_names_fix(tmp_path: Path, content: bytes | None) -> None:
    store = tmp_path / "store.db"
    if content is None:
        store.mkdir()
    else:
        store.write_bytes(content)
    with pytest.raises(StoreError) as refused, open_store(ServerConfig(home=tmp_path)):
        pass
    assert str(store) in (refused.value.hint or "")
    assert "backup" in (refused.value.hint or "")


def test_store_password_is_redacted() -> None:
    shown = redact_url("postgresql://me:secret@db.example.org/tinkex")
    assert shown == "postgresql://me:***@db.example.org/tinkex"


def test_worker_heartbeats_during_long_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "HEARTBEAT_SECONDS", 0.01)
    config = ServerConfig(home=tmp_path, engine="fake")
    with open_store(config) as database, open_worker(config) as worker:
        # Its loop does not run, as during a very long batch.
        (first,) = workers(database)
        eventually(lambda: workers(database)[0].seen_at > first.seen_at)
        worker.stop()
        worker.run()


def test_stopped_worker_does_not_heartbeat(tmp_path: Path) -> None:
    with open_store(ServerConfig(home=tmp_path)) as database:
        listener = WakeupListener(database, "worker")
        listener.heartbeat()
        assert len(workers(database)) == 1
        listener.close()
        listener.heartbeat()
        assert workers(database) == []


def workers(database: Database) -> list[ProcessRecord]:
    """The workers that are alive according to the store."""
    return database.read(lambda db: coordination.list_alive_processes(db, "worker", since=0.0))
