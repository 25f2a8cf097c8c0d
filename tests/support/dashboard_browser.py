"""Somebody who looks at pages: from which address, under which name, with which cookie."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import sqlalchemy as sa

from tests.support.server_harness import ServerHarness
from tinkex.ids import new_id
from tinkex.store import runs, schema, sessions, steps
from tinkex.store.database import Connection
from tinkex.store.records import RunRecord, RunState, SessionRecord, StepRecord


@dataclass
class Browser:
    """Remembers cookies, as browsers do; follows nothing by itself."""

    harness: ServerHarness
    peer: str = "127.0.0.1"
    host: str = "localhost:8000"
    scheme: str = "http"
    headers: Mapping[str, str] = field(default_factory=dict)
    cookies: httpx.Cookies = field(default_factory=httpx.Cookies)

    def get(self, path: str = "/", method: str = "GET", **options: Any) -> httpx.Response:
        return asyncio.run(self._send_request(method, path, options))

    def post(self, path: str, **form: str) -> httpx.Response:
        return asyncio.run(self._send_request("POST", path, {"data": form}))

    async def _send_request(
        self, method: str, path: str, options: dict[str, Any]
    ) -> httpx.Response:
        app: Any = self.harness.client.app
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app, client=(self.peer, 4321)),
            base_url=f"{self.scheme}://{self.host}",
            headers=dict(self.headers),
            cookies=self.cookies,
        ) as client:
            answer = await client.request(method, path, **options)
            self.cookies = client.cookies
            return answer


def add_session(harness: ServerHarness, tenant_id: str, **changes: Any) -> SessionRecord:
    now = time.time()
    values: dict[str, Any] = {
        "id": new_id(),
        "tenant_id": tenant_id,
        "project_id": "default",
        "display_name": None,
        "tags": [],
        "user_metadata": {},
        "sdk_version": "0.36.0",
        "created_at": now,
        "seen_at": now,
    }
    session = SessionRecord(**values | changes)
    harness.write(lambda db: sessions.insert(db, session))
    return session


def add_run(harness: ServerHarness, session: SessionRecord, **changes: Any) -> RunRecord:
    now = time.time()
    values: dict[str, Any] = {
        "id": f"{session.id}:train:0",
        "tenant_id": session.tenant_id,
        "session_id": session.id,
        "base_model": "tinkex/bigram",
        "spec": {"rank": 8},
        "user_metadata": None,
        "state": RunState.READY,
        "created_at": now,
        "used_at": now,
    }
    run = RunRecord(**values | changes)

    def work(db: Connection) -> None:
        runs.insert(db, run)
        _insert_step(db, run, "create_model", 0, {})

    harness.write(work)
    return run


def add_updates(
    harness: ServerHarness, run: RunRecord, *losses: float, num_tokens: int = 10
) -> None:
    """One pass and one optimizer step per loss, as the worker would note them."""

    def work(db: Connection) -> None:
        for loss in losses:
            _insert_step(db, run, "forward_backward", num_tokens, {"loss:sum": loss * num_tokens})
            _insert_step(db, run, "optim_step", 0, {})
        # With them goes what tells that the run has changed.
        applied = schema.runs.c.applied + 2 * len(losses)
        change = sa.update(schema.runs).where(schema.runs.c.id == run.id)
        db.execute(change.values(applied=applied))

    harness.write(work)


def _insert_step(
    db: Connection, run: RunRecord, kind: str, num_tokens: int, metrics: dict[str, float]
) -> None:
    now = time.time()
    step = StepRecord(
        session_id=run.session_id,
        run_id=run.id,
        sampler_id=None,
        kind=kind,
        job_id=new_id(),
        num_tokens=num_tokens,
        metrics=metrics,
        queued_at=now - 0.2,
        started_at=now - 0.1,
        finished_at=now,
    )
    steps.insert(db, step)
