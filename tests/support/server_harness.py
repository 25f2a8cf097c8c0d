"""A server without a worker, in this process: a real store, the real application, jobs by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from litestar.testing import TestClient

from tinkex.checkpoint.storage import FileStorage
from tinkex.home import Home
from tinkex.jobs.future_waiters import FutureWaiters
from tinkex.jobs.queue import JobQueue
from tinkex.jobs.quotas import QuotaChecks
from tinkex.jobs.token_streams import TokenStreams
from tinkex.jobs.wakeup import WakeupListener, WakeupSender
from tinkex.server.app import create_app
from tinkex.server.config import ServerConfig
from tinkex.server.http.model_tokenizers import load_served_tokenizer
from tinkex.server.http.request_context import Handler, Services
from tinkex.server.wiring import open_blobs
from tinkex.store import groups, jobs, keys, schema, settings
from tinkex.store.database import Connection, Database
from tinkex.store.migrations import migrate
from tinkex.store.records import GroupRecord, GroupState, JobRecord, NewJob

KEY = "tml-alice"
OTHER_KEY = "tml-bob"
API = "/api/v1"
BASE_MODEL = "tinkex/bigram"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHarness:
    """The services, somebody who asks, and hands to do the worker's part."""

    services: Services
    client: TestClient[Any]
    tenant_id: str
    other_tenant_id: str

    def send_request(
        self, method: str, path: str, *, key: str | None = KEY, **options: Any
    ) -> httpx.Response:
        """One request below /api/v1, with a key unless told otherwise."""
        headers = {**({"X-API-Key": key} if key else {}), **options.pop("headers", {})}
        return self.client.request(method, API + path, headers=headers, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """One request with a JSON body."""
        return self.send_request("POST", path, json=body, **options)

    def session(self, key: str = KEY) -> str:
        """A fresh session."""
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        answer = self.post("/create_session", body, key=key)
        assert answer.status_code == 200, answer.text
        session_id: str = answer.json()["session_id"]
        return session_id

    def submit_job(self, kind: str = "optim_step", **fields: Any) -> JobRecord:
        """A promise of the first tenant, as a route would make it."""
        new = NewJob(
            id="",
            tenant_id=self.tenant_id,
            session_id="s",
            kind=kind,
            key=None,
            payload=b"{}",
            position=0,
        )
        return self.services.queue.submit(replace(new, **fields)).result()

    def finish(
        self,
        job: JobRecord,
        result: bytes | None = b"{}",
        *,
        error: str | None = None,
        ring: bool = True,
    ) -> None:
        """End a promise, as the worker would."""
        now = time.time()
        ending = jobs.JobEnding(
            job=job,
            result=None if error else result,
            error=error,
            category="user" if error else None,
            started_at=now,
            finished_at=now,
        )
        self.services.database.write(lambda db: jobs.finish(db, ending))
        if ring:
            ringer = WakeupSender(self.services.database, "api")
            ringer.notify([job.id])
            ringer.close()

    def read(self, work: Any) -> Any:
        """Look into the store."""
        return self.services.database.read(work)

    def write(self, work: Any) -> Any:
        """Change the store."""
        return self.services.database.write(work)


@contextlib.contextmanager
def open_harness(
    root: Path, routes: dict[str, Handler] | None = None, **options: Any
) -> Iterator[ServerHarness]:
    """A house with two tenants; `options` are settings, `routes` are served instead of all."""
    root.mkdir(parents=True, exist_ok=True)
    config = ServerConfig(home=root, **{"long_poll_seconds": 1.0, **options})
    with contextlib.ExitStack() as stack:
        database = Database(config.store_url)
        stack.callback(database.close)
        migrate(database)
        secret = database.write(settings.get_or_create_secret)
        tenant_id, other_tenant_id = database.write(_create_tenants)
        bell = WakeupListener(database, "api")
        stack.callback(bell.close)
        quotas = QuotaChecks(config.quotas)
        queue = JobQueue(database, config.queue_limits, secret, quotas)
        stack.callback(queue.close)
        waiters = FutureWaiters(queue, bell)
        storage = FileStorage(Home(root), open_blobs(config))
        services = Services(
            config=config,
            home=Home(root),
            storage=storage,
            database=database,
            queue=queue,
            quotas=quotas,
            waiters=waiters,
            token_streams=TokenStreams(database, queue, waiters, secret),
            process_id=bell.process.id,
            secret=secret,
            load_tokenizer=partial(load_served_tokenizer, storage, Home(root)),
        )
        app = create_app(services) if routes is None else create_app(services, routes, ())
        client = stack.enter_context(TestClient(app, raise_server_exceptions=False))
        yield ServerHarness(
            services=services, client=client, tenant_id=tenant_id, other_tenant_id=other_tenant_id
        )


def _create_tenants(db: Connection) -> tuple[str, str]:
    now = time.time()
    alice = keys.get_or_create_tenant(db, "alice@example.com", now)
    bob = keys.get_or_create_tenant(db, "bob", now)
    keys.insert_key(db, alice.id, KEY, name="alice's", note="at home", now=now)
    keys.insert_key(db, bob.id, OTHER_KEY, name="bob's", now=now)
    model = {
        "name": BASE_MODEL,
        "max_context_tokens": 512,
        "arch": "bigram",
        "vocab_size": 512,
        "tokenizer_id": None,
        "is_trainable": True,
        "is_sampleable": True,
    }
    publish_models(db, model)
    return alice.id, bob.id


def clear_base_models(db: Connection) -> None:
    """As if no worker had said yet what it serves."""
    db.execute(schema.groups.delete())


def publish_empty_models(db: Connection) -> None:
    """As a worker does that serves nothing."""
    publish_models(db)


def publish_models(db: Connection, *models: Mapping[str, object], group_id: str = "") -> None:
    """Register a group that serves these base models."""
    group = GroupRecord(
        id=group_id,
        state=GroupState.READY,
        base_models=list(models),
        models_source="",
        host="here",
        load={},
        started_at=time.time(),
        seen_at=time.time(),
    )
    groups.register(db, group)
