from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.asgi_client import send_request
from tests.support.server_harness import KEY, ServerHarness
from tinkex.errors import StoreUnavailable
from tinkex.jobs.wakeup import WakeupListener
from tinkex.server.app import ROUTES
from tinkex.server.http.openapi import document_path
from tinkex.store.database import Database
from tinkex.wire.endpoints import ENDPOINTS

AUTH = {"X-API-Key": KEY}
OPS = ["/readyz", "/metrics"]


def numbers(harness: ServerHarness) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of /metrics."""
    text = harness.client.get("/metrics", headers=AUTH).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_ready_requires_worker(harness: ServerHarness) -> None:
    before = harness.client.get("/readyz", headers=AUTH)
    assert before.status_code == 503
    assert before.json() == {"status": "not ready", "reason": "no worker is running"}

    listener = WakeupListener(harness.services.database, "worker")
    try:
        after = harness.client.get("/readyz", headers=AUTH)
    finally:
        listener.close()

    assert (after.status_code, after.json()) == (200, {"status": "ready"})


def test_not_ready_when_store_is_unavailable(
    harness: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.send_request("GET", "/get_server_capabilities")  # so that the key is cached

    def fail(self: Database, work: Any) -> Any:
        raise StoreUnavailable("the disk is gone")

    monkeypatch.setattr(Database, "read", fail)

    ready = harness.client.get("/readyz", headers=AUTH)
    assert (ready.status_code, ready.json()["reason"]) == (503, "the disk is gone")
    assert numbers(harness)["tinkex_store_up", ()] == 0.0
    assert harness.send_request("GET", "/healthz", key=None).status_code == 200
    refused = harness.send_request("GET", "/get_server_capabilities")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"


def test_metrics_content_type_has_one_charset(harness: ServerHarness) -> None:
    kind = harness.client.get("/metrics", headers=AUTH).headers["content-type"]
    assert kind.startswith("text/plain; version=")
    assert kind.count("charset") == 1


def test_metrics_report_store_state(harness: ServerHarness) -> None:
    harness.session()
    listener = WakeupListener(harness.services.database, "worker")
    try:
        first = harness.submit_job()
        harness.submit_job()
        harness.finish(harness.submit_job())
        values = numbers(harness)
    finally:
        listener.close()

    assert values["tinkex_jobs_waiting", ()] == 2.0
    assert values["tinkex_jobs_running", ()] == 0.0
    assert values["tinkex_sessions_active", ()] == 1.0
    assert values["tinkex_workers_alive", ()] == 1.0
    assert values["tinkex_store_up", ()] == 1.0
    assert values["tinkex_store_bytes", ()] > 10_000
    assert 0.0 < values["tinkex_oldest_waiting_seconds", ()] <= time.time() - first.created_at


def test_metrics_count_requests_by_endpoint_and_status(harness: ServerHarness) -> None:
    good = ("tinkex_requests_total", (("endpoint", "health"), ("status", "200")))
    bad = ("tinkex_requests_total", (("endpoint", "session_heartbeat"), ("status", "404")))
    timed = ("tinkex_request_seconds_count", (("endpoint", "health"),))
    before = numbers(harness)

    harness.send_request("GET", "/healthz", key=None)
    harness.post("/session_heartbeat", {"session_id": "x"})

    after = numbers(harness)
    for name in (good, bad, timed):
        assert after[name] == before.get(name, 0.0) + 1.0


@pytest.mark.parametrize("path", OPS)
@pytest.mark.asyncio
async def test_monitoring_requires_loopback_or_key(harness: ServerHarness, path: str) -> None:
    app = harness.client.app
    no_key = {"x-api-key": "", "host": "localhost:8000"}
    here = await send_request(app, "GET", path, headers=no_key)
    by_a_strange_name = await send_request(
        app, "GET", path, headers={**no_key, "host": "evil.example"}
    )
    proxied = await send_request(app, "GET", path, headers={**no_key, "x-forwarded-for": "1.2.3.4"})
    far = await send_request(app, "GET", path, headers=no_key, client="192.0.2.1")
    far_with_key = await send_request(app, "GET", path, client="192.0.2.1")

    assert here.status != 401
    assert by_a_strange_name.status == 401
    assert proxied.status == 401
    assert far.status == 401
    assert far_with_key.status != 401


@pytest.mark.parametrize("path", ["/schema", "/schema/openapi.json", "/openapi.json"])
def test_openapi_document_is_public_and_complete(harness: ServerHarness, path: str) -> None:
    answer = harness.client.get(path)

    assert answer.headers["content-type"] == "application/json"
    document = answer.json()
    assert document["openapi"].startswith("3.1")
    for name in ROUTES:
        row = ENDPOINTS[name]
        operation = document["paths"][document_path(row.path)][row.method.lower()]
        assert operation["operationId"] == name
        assert operation["summary"]
