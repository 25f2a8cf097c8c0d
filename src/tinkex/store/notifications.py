"""Messages between machines through PostgreSQL: LISTEN and NOTIFY on connections of their own.

A NOTIFY inside a transaction would serialize all commits of the database, so messages are sent by a
thread, after the commit and in batches. They are hints: they may be late or lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable

import sqlalchemy as sa

from tinkex.logs import get_logger

LOG = get_logger(__name__)
CHANNEL = "tinkex_wakeup"
#: PostgreSQL rejects payloads of 8,000 bytes and more.
MAX_PAYLOAD_BYTES = 7000
#: How long messages are collected before they are sent together.
BATCH_SECONDS = 0.005
#: How long the listener waits at a time, and pauses after the database was unreachable.
_WAIT_SECONDS = 0.25
_PAUSE_SECONDS = 1.0
_NOTIFY = sa.select(sa.func.pg_notify(CHANNEL, sa.bindparam("payload")))


class NotificationListener:
    """Calls a function with the messages to one role, on a thread of its own."""

    def __init__(self, engine: sa.Engine, role: str, receive: Callable[[str], None]) -> None:
        self._engine = engine
        self._prefix = f"{role}\n"
        self._receive = receive
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._stop_event.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop_event.is_set():
            try:
                self._listen()
            except sa.exc.SQLAlchemyError as error:
                LOG.debug("cannot listen for notifications: %s", error)
                self._stop_event.wait(_PAUSE_SECONDS)

    def _listen(self) -> None:
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            db.execute(sa.text(f"LISTEN {CHANNEL}"))
            try:
                while not self._stop_event.is_set():
                    self._receive_some(db)
            except db.dialect.loaded_dbapi.Error as error:
                raise sa.exc.InterfaceError("LISTEN", None, error) from error
            finally:
                # Closed, not reused: a connection of the pool must not collect messages.
                db.invalidate()

    def _receive_some(self, db: sa.Connection) -> None:
        driver = db.connection.driver_connection
        assert driver is not None
        for notification in driver.notifies(timeout=_WAIT_SECONDS, stop_after=1):
            if notification.payload.startswith(self._prefix):
                self._receive(notification.payload.removeprefix(self._prefix))


class NotificationSender:
    """Sends messages to all listeners of a role; thread-safe."""

    def __init__(self, engine: sa.Engine, role: str) -> None:
        self._engine = engine
        self._role = role
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, messages: Iterable[str]) -> None:
        """Queue messages."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
                self._thread.start()
        for message in messages:
            self._queue.put(message)

    def close(self) -> None:
        """Send what is queued and stop."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            time.sleep(BATCH_SECONDS)
            messages, is_last = [first], False
            while not self._queue.empty() and not is_last:
                message = self._queue.get()
                is_last = message is None
                messages += [] if message is None else [message]
            try:
                self._send_batch(list(dict.fromkeys(messages)))
            except sa.exc.SQLAlchemyError as error:
                LOG.debug("cannot send notifications: %s", error)
            if is_last:
                return

    def _send_batch(self, messages: list[str]) -> None:
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            for payload in split_payloads(self._role, messages):
                db.execute(_NOTIFY, {"payload": payload})


def split_payloads(role: str, messages: Iterable[str]) -> list[str]:
    """Join messages to payloads that PostgreSQL accepts, each with the role in its first line."""
    payloads: list[str] = []
    for message in messages:
        if payloads and len(payloads[-1]) + len(message) < MAX_PAYLOAD_BYTES:
            payloads[-1] += f"\n{message}"
        else:
            payloads.append(f"{role}\n{message}")
    return payloads
