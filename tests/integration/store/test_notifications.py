"""Messages through PostgreSQL: to all listeners of a role, also after a lost connection."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import closing

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from tests.support.postgres import PostgresServer
from tests.support.serve_process import eventually
from tinkex.jobs import wakeup
from tinkex.jobs.wakeup import WakeupListener, WakeupSender
from tinkex.store.database import Database
from tinkex.store.migrations import migrate
from tinkex.store.notifications import (
    MAX_PAYLOAD_BYTES,
    NotificationListener,
    NotificationSender,
    split_payloads,
)


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    address = postgres.create_database()
    with closing(Database(address)) as database:
        migrate(database)
        yield database
    postgres.drop_database(address)


def listening(database: Database) -> bool:
    query = sa.text("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
    return bool(database.read(lambda db: db.scalar(query)))


def test_messages_reach_listeners_of_their_role(database: Database) -> None:
    received: queue.Queue[str] = queue.Queue()
    others: queue.Queue[str] = queue.Queue()
    with (
        closing(NotificationListener(database.engine, "worker", received.put)),
        closing(NotificationListener(database.engine, "api", others.put)),
        closing(NotificationSender(database.engine, "worker")) as sender,
    ):
        eventually(lambda: listening(database))
        texts = [f"job-{number}" for number in range(2000)]
        sender.send(texts)
        arrived: list[str] = []
        while len(arrived) < len(texts):
            arrived += received.get(timeout=30).split()
    assert arrived == texts
    assert others.empty()


def test_listener_survives_a_lost_connection(database: Database) -> None:
    received: queue.Queue[str] = queue.Queue()
    terminate = sa.text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' "
        "AND pid <> pg_backend_pid()"
    )
    with (
        closing(NotificationListener(database.engine, "api", received.put)),
        closing(NotificationSender(database.engine, "api")) as sender,
    ):
        eventually(lambda: listening(database))
        database.read(lambda db: db.execute(terminate).all())
        eventually(lambda: not listening(database))
        eventually(lambda: listening(database))
        sender.send(["hello"])
        assert received.get(timeout=30) == "hello"


def test_process_on_another_machine_is_woken(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "network_id", lambda: "elsewhere")
    with closing(WakeupListener(database, "worker")) as listener:
        monkeypatch.setattr(wakeup, "network_id", lambda: "here")
        eventually(lambda: listening(database))
        with closing(WakeupSender(database, "worker")) as sender:
            sender.notify(["job-1"])
            eventually(lambda: "job-1" in listener.messages())


@given(st.lists(st.text("abc-0123", min_size=1, max_size=80), max_size=500))
def test_payloads_are_small_and_complete(messages: list[str]) -> None:
    payloads = split_payloads("worker", messages)
    assert all(len(payload.encode()) <= MAX_PAYLOAD_BYTES + 100 for payload in payloads)
    assert all(payload.startswith("worker\n") for payload in payloads)
    joined = [line for payload in payloads for line in payload.split("\n")[1:]]
    assert joined == messages
