"""StubServer: the server application with the fake engine, inside the calling process."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tinkex import clock
from tinkex.engine.fake.engine import FakeEngine
from tinkex.errors import InvalidInput
from tinkex.home import Home
from tinkex.installation import install_command
from tinkex.testing.asgi import CALL, ASGIApp, Receive, Scope, Send
from tinkex.testing.calls import Call, CallLog, CallRecorder, check_endpoint
from tinkex.testing.dialects import DialectAdapter, find_dialect
from tinkex.testing.faults import Fault, FaultInjector, FaultPlan, Match

try:
    from tinkex.jobs.worker import Worker
    from tinkex.server.app import create_app
    from tinkex.server.config import ServerConfig
    from tinkex.server.http.request_context import Services
    from tinkex.server.periodic import PeriodicTask
    from tinkex.server.wiring import (
        HEARTBEAT_SECONDS,
        open_services,
        open_store,
        worker_config,
    )
    from tinkex.store import keys, sessions, stats
    from tinkex.store.database import Connection, Database
    from tinkex.store.keys import KEY_PREFIX
    from tinkex.store.records import SessionRecord
    from tinkex.testing.loopback import HOST, Loopback
except ModuleNotFoundError as error:
    raise ImportError(f"the stub server needs {error.name}: {install_command('server')}") from error

#: The key of a server that accepts any key, which the client never sees.
_ONLY_KEY = "tml-any-key"
_STOP_SECONDS = 30.0
#: What the server sets by default; a stub server sets only what it is given.
_NO_CLIENT_FLAGS = {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False}
#: Small, so that a test reaches it with a small model.
_INLINE_RESULT_BYTES = 64 * 1024
_NO_DYNAMIC_FLAGS = {"sample_cancel_enabled": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class StubConfig(ServerConfig):
    """Settings without the limits for operators: tests need shorter polls and longer work."""

    def __post_init__(self) -> None:
        """Accept every value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A client's session, as it is stored."""

    session_id: str
    tenant: str
    """The API key that created it; empty on a server that accepts any key."""
    created_at: datetime
    tags: list[str] = field(default_factory=list)
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    project_id: str = "default"
    display_name: str | None = None
    sdk_version: str = ""
    heartbeats: list[float] = field(default_factory=list)
    """When heartbeats arrived, on the monotonic clock."""
    finish_reason: str | None = None
    finish_detail: str | None = None


class StubServer:
    """The server application in this process, on a free port of this machine.

    It trains and samples a real, tiny model: a bigram table over 512 tokens, of which the first 256
    are bytes. Use it as a context manager, or call `start` and `stop`. Its store and checkpoints
    are in a temporary directory, which is removed together with the object.
    """

    def __init__(  # noqa: PLR0913 - every option has a default, and tests name those they need
        self,
        *,
        client_config: Mapping[str, Any] | None = None,
        dynamic_config: Mapping[str, Any] | None = None,
        api_keys: Iterable[str] | None = None,
        models: Iterable[str] = ("tinkex/bigram",),
        long_poll_seconds: float = 5.0,
        work_seconds: float = 0.0,
        gap_seconds: float = 1.0,
        token_seconds: float = 3600.0,
        seconds_per_token: float = 0.0,
        dialect: str = "current",
        port: int = 0,
        record: bool = True,
    ) -> None:
        if isinstance(models, str):
            raise InvalidInput(f"models is a list of names, got the text {models!r}")
        self._dialect = find_dialect(dialect)
        home = Path(tempfile.mkdtemp(prefix="tinkex-stub-"))
        weakref.finalize(self, shutil.rmtree, home, ignore_errors=True)
        self._config = StubConfig(
            home=home,
            engine="fake",
            models=tuple(models),
            client_flags={**_NO_CLIENT_FLAGS, **(client_config or {})},
            dynamic_flags={**_NO_DYNAMIC_FLAGS, **(dynamic_config or {})},
            long_poll_seconds=long_poll_seconds,
            fake_seconds=work_seconds,
            fake_token_seconds=seconds_per_token,
            gap_seconds=gap_seconds,
            jwt_seconds=token_seconds,
            inline_result_bytes=_INLINE_RESULT_BYTES,
        )
        self._api_keys = None if api_keys is None else sorted(set(api_keys))
        self._key_by_tenant: dict[str, str] = {}
        self._faults = FaultPlan()
        self._log = CallLog() if record else None
        self._port = port
        self._running: contextlib.ExitStack | None = None

    # --- start and stop ---------------------------------------------------------------------
    def start(self) -> Self:
        """Start serving; a restarted server keeps its port and its state."""
        if self._running is not None:
            raise RuntimeError("the stub server is running already")
        with contextlib.ExitStack() as stack:
            _create_store(self._config.home)
            services = stack.enter_context(open_services(self._config))
            self._key_by_tenant = services.database.write(self._create_keys)
            stack.enter_context(_run_worker(services))
            loopback = Loopback(self._make_app(services), self._port, services)
            stack.callback(loopback.stop)
            self._port = loopback.port
            self._running = stack.pop_all()
        return self

    def stop(self) -> None:
        """Close every connection and stop serving; the store and checkpoints stay."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def restart(self) -> None:
        """Stop if running, then serve on the same port with the same state."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _create_keys(self, db: Connection) -> dict[str, str]:
        """Make a tenant per API key, unless it exists; the key of each tenant by its id."""
        key_by_tenant = {}
        for number, key in enumerate((_ONLY_KEY,) if self._api_keys is None else self._api_keys):
            secret = self._stored_key(key)
            found = keys.find_by_secret(db, secret)
            if found is None:
                email = f"user{number or ''}@example.com"
                tenant = keys.get_or_create_tenant(db, email, clock.now())
                found = keys.insert_key(db, tenant.id, secret, name="stub key", now=clock.now())
            key_by_tenant[found.tenant_id] = "" if self._api_keys is None else key
        return key_by_tenant

    def _stored_key(self, key: str) -> str:
        """The key that the application knows for the one that a client sends."""
        if self._api_keys is None:
            return _ONLY_KEY
        # The application takes keys without the prefix for tokens.
        return key if key not in self._api_keys else f"{KEY_PREFIX}{key.removeprefix(KEY_PREFIX)}"

    def _make_app(self, services: Services) -> ASGIApp:
        app: ASGIApp = create_app(services)
        app = DialectAdapter(app, self._dialect)
        app = KeyAdapter(app, self._stored_key)
        return CallRecorder(FaultInjector(app, self._faults), self._log)

    @property
    def url(self) -> str:
        """Where the server is: http://127.0.0.1:port."""
        if self._port == 0:
            raise RuntimeError("the stub server has not been started")
        return f"http://{HOST}:{self._port}"

    # --- what happened ----------------------------------------------------------------------
    def calls(self, endpoint: str | None = None) -> list[Call]:
        """The calls in order of arrival, of one endpoint (by its name in the table) or of all."""
        if endpoint is not None:
            check_endpoint(endpoint)
        return self._get_log().calls(endpoint)

    def wait_for(self, endpoint: str, count: int = 1, timeout: float = 30.0) -> list[Call]:
        """Block until that many calls arrived, else raise AssertionError with what was seen."""
        return self._get_log().wait_for(check_endpoint(endpoint), count, timeout)

    def _get_log(self) -> CallLog:
        if self._log is None:
            raise RuntimeError("this stub server was made with record=False and keeps no calls")
        return self._log

    @property
    def executed(self) -> list[tuple[str, int | None, str]]:
        """(model_id, seq_id, kind) of the models' operations, in the order they were executed."""
        with self._open_database() as database:
            return database.read(stats.list_executed_operations)

    @property
    def sessions(self) -> dict[str, Session]:
        """The sessions by id, oldest first."""
        with self._open_database() as database:
            found = database.read(self._list_sessions)
        heartbeats = self._heartbeats_by_session()
        return {
            each.id: Session(
                session_id=each.id,
                tenant=self._key_by_tenant.get(each.tenant_id, ""),
                created_at=datetime.fromtimestamp(each.created_at, UTC),
                tags=each.tags,
                user_metadata=each.user_metadata,
                project_id=each.project_id,
                display_name=each.display_name,
                sdk_version=each.sdk_version,
                heartbeats=heartbeats.get(each.id, []),
                finish_reason=each.finish_reason,
                finish_detail=each.finish_detail,
            )
            for each in found
        }

    def _list_sessions(self, db: Connection) -> list[SessionRecord]:
        found = [
            record
            for tenant_id in self._key_by_tenant
            for record in sessions.find_many(
                db, sessions.list_ids(db, tenant_id, limit=-1, offset=0)
            ).values()
        ]
        return sorted(found, key=lambda record: (record.created_at, record.id))

    @property
    def finish_reasons(self) -> dict[str, str]:
        """success, errored or interrupted, by the id of each session that was finished."""
        return {
            session_id: session.finish_reason
            for session_id, session in self.sessions.items()
            if session.finish_reason is not None
        }

    def heartbeats(self, session_id: str | None = None) -> list[float]:
        """When heartbeats arrived, on the monotonic clock; of one session or of all."""
        by_session = self._heartbeats_by_session()
        if session_id is not None:
            return by_session.get(session_id, [])
        return sorted(beat for beats in by_session.values() for beat in beats)

    def _heartbeats_by_session(self) -> dict[str, list[float]]:
        """The heartbeats that reached the application, not those that a fault replaced."""
        found: dict[str, list[float]] = {}
        for call in self._log.calls("session_heartbeat") if self._log is not None else ():
            if call.was_served:
                found.setdefault(call.message["session_id"], []).append(call.arrived_at)
        return found

    @contextlib.contextmanager
    def _open_database(self) -> Iterator[Database]:
        with contextlib.closing(Database(self._config.store_url)) as database:
            yield database

    # --- faults -----------------------------------------------------------------------------
    def inject(
        self, endpoint: str, fault: Fault, times: int | None = 1, match: Match | None = None
    ) -> None:
        """Let the next calls of an endpoint fail; `times` None means all of them.

        `match` is called in the server's thread and selects the calls.
        """
        self._faults.add(check_endpoint(endpoint), fault, times, match)

    def clear_faults(self) -> None:
        """Remove all faults."""
        self._faults.clear()


class KeyAdapter:
    """Replaces the API key of every request by the one that the application knows."""

    def __init__(self, app: ASGIApp, stored_key: Callable[[str], str]) -> None:
        self._app = app
        self._stored_key = stored_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replace the credential of a request and pass it on."""
        call: Call | None = scope.get(CALL)
        if call is not None:
            key = self._stored_key(call.api_key or "")
            others = [pair for pair in scope["headers"] if pair[0] != b"x-api-key"]
            header = [(b"x-api-key", key.encode("latin-1"))] if key else []
            scope = {**scope, "headers": [*others, *header]}
        await self._app(scope, receive, send)


@functools.cache
def _empty_store() -> bytes:
    """The content of a new store's file, which is faster to copy than to create."""
    with tempfile.TemporaryDirectory(prefix="tinkex-stub-") as folder:
        with open_store(StubConfig(home=Path(folder), engine="fake")):
            pass
        return Home(Path(folder)).store_file.read_bytes()


def _create_store(folder: Path) -> None:
    """Create a home with an empty store, unless the server was started before."""
    home = Home(folder)
    home.create()
    if not home.store_file.exists():
        home.store_file.write_bytes(_empty_store())


@contextlib.contextmanager
def _run_worker(services: Services) -> Iterator[None]:
    """Run a worker with the fake engine in a thread until the block ends."""
    config, database = services.config, services.database
    with contextlib.ExitStack() as stack:
        engine = FakeEngine(
            config.models,
            seconds_per_op=config.fake_seconds,
            seconds_per_token=config.fake_token_seconds,
        )
        stack.callback(engine.close)
        worker = Worker(
            database=database, engine=engine, home=services.home, config=worker_config(config)
        )
        # The thread registers it too, but a client may list its models before it has started.
        worker.register()
        thread = threading.Thread(target=worker.run, name="tinkex-stub-worker", daemon=True)
        thread.start()
        stack.enter_context(PeriodicTask("heartbeat", worker.heartbeat, HEARTBEAT_SECONDS))
        try:
            yield
        finally:
            worker.stop()
            engine.interrupt()
            thread.join(_STOP_SECONDS)
            if thread.is_alive():
                raise RuntimeError(f"the worker did not stop within {_STOP_SECONDS:g} s")
