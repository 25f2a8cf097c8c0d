"""Requests that wait: disconnects, limits, timeouts, keep-alive comments and late errors.

There is no worker: samples stay queued until a test finishes them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import pytest

from tests.integration.conftest import eventually
from tests.support.server_harness import KEY, OTHER_KEY, clear_base_models, publish_models
from tinkex import clock
from tinkex.jobs.wakeup import WakeupSender
from tinkex.models import TINY_FOLDER
from tinkex.server.app import create_app
from tinkex.server.http.request_context import Services
from tinkex.server.inference import inference_reply
from tinkex.server.wiring import open_services, open_store
from tinkex.store import jobs, keys, schema
from tinkex.store.database import Connection
from tinkex.store.records import JobRecord, JobState
from tinkex.testing.loopback import Loopback
from tinkex.testing.server import StubConfig
from tinkex.text import encode, load_tokenizer
from tinkex.types import SampledSequence, SampleResponse
from tinkex.wire.proto import encode_sample_response

MODEL = "tinkex/tiny"
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
STREAM = BODY | {"stream": True}
TIMEOUT_SECONDS = 30.0


class Waiting:
    """A server without a worker, on a socket."""

    def __init__(self, services: Services, url: str) -> None:
        self.services = services
        self.url = url

    def client(self, key: str = KEY, timeout: float = TIMEOUT_SECONDS) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def send_raw(self, body: dict[str, Any], headers: str = "") -> socket.socket:
        """Send a request on a connection of its own, whose response the test does not read."""
        url = httpx.URL(self.url)
        connection = socket.create_connection((url.host, url.port), TIMEOUT_SECONDS)
        content = json.dumps(body)
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nhost: test\r\nx-api-key: {KEY}\r\n{headers}"
            f"content-length: {len(content)}\r\n\r\n{content}".encode()
        )
        return connection

    def jobs(self) -> list[JobRecord]:
        columns = [schema.jobs.c[name] for name in JobRecord.__dataclass_fields__]
        query = schema.jobs.select().with_only_columns(*columns)
        return self.services.database.read(
            lambda db: [JobRecord.from_row(row) for row in db.execute(query).all()]
        )

    def wait_for_jobs(self, count: int = 1) -> list[JobRecord]:
        eventually(lambda: len(self.jobs()) >= count, TIMEOUT_SECONDS)
        return self.jobs()

    def states(self) -> set[str]:
        return {job.state for job in self.jobs()}

    def finish(self, job: JobRecord, text: str = "", error: str | None = None) -> None:
        """End a sample, as the worker does."""
        tokens = encode(load_tokenizer(str(TINY_FOLDER)), text, add_special_tokens=False)
        sequence = SampledSequence(
            "stop", "", np.array(tokens, dtype=np.int32), np.zeros(len(tokens), dtype=np.float32)
        )
        ending = jobs.JobEnding(
            job=job,
            result=None if error else encode_sample_response(SampleResponse([sequence])),
            error=error,
            category="user" if error else None,
            started_at=clock.now(),
            finished_at=clock.now(),
        )
        self.services.database.write(lambda db: jobs.finish(db, ending))
        sender = WakeupSender(self.services.database, "api")
        sender.notify([job.id])
        sender.close()


class Open(Protocol):
    def __call__(self, **settings: Any) -> Waiting: ...


@pytest.fixture
def open_server(tmp_path: Path) -> Iterator[Open]:
    model = {
        "name": MODEL,
        "max_context_tokens": 512,
        "arch": "llama",
        "vocab_size": 4096,
        "tokenizer_folder": str(TINY_FOLDER),
    }
    with ExitStack() as stack:

        def open_one(**settings: Any) -> Waiting:
            config = StubConfig(home=tmp_path / "home", engine="fake", **settings)
            with open_store(config) as database:
                database.write(create_keys)
                database.write(lambda db: publish_models(db, model))
            services = stack.enter_context(open_services(config))
            loopback = Loopback(create_app(services), 0, services)
            stack.callback(loopback.stop)
            return Waiting(services, f"http://127.0.0.1:{loopback.port}")

        yield open_one


def create_keys(db: Connection) -> None:
    for key in (KEY, OTHER_KEY):
        tenant = keys.get_or_create_tenant(db, key, clock.now())
        keys.insert_key(db, tenant.id, key, name=key, now=clock.now())


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_disconnect_cancels_the_sample(open_server: Open, body: dict[str, Any]) -> None:
    server = open_server()
    with server.send_raw(body):
        server.wait_for_jobs()
    eventually(lambda: server.states() == {JobState.FAILED}, TIMEOUT_SECONDS)


def test_sample_with_a_key_survives_its_client(open_server: Open) -> None:
    server = open_server()
    with server.send_raw(BODY, "idempotency-key: mine\r\n"):
        (job,) = server.wait_for_jobs()
    server.finish(job, "late")
    with server.client() as client:
        answer = client.post(CHAT, json=BODY, headers={"idempotency-key": "mine"}).json()
    assert answer["choices"][0]["message"]["content"] == "late"
    assert len(server.jobs()) == 1


def test_keep_alive_and_the_end(open_server: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_reply, "START_SECONDS", 0.05)
    monkeypatch.setattr(inference_reply, "KEEP_ALIVE_SECONDS", 0.05)
    server = open_server()
    with server.client() as client, client.stream("POST", CHAT, json=STREAM) as reply:
        assert reply.status_code == 200
        parts = reply.iter_text()
        assert next(parts) == ": keep-alive\n\n"
        (job,) = server.wait_for_jobs()
        assert reply.headers["x-request-id"] == job.id
        server.finish(job, "There.")
        rest = "".join(parts).replace(": keep-alive\n\n", "")
    events = rest.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events[:-2]]
    assert "".join(delta.get("content", "") for delta in deltas) == "There."


def test_error_after_the_start(open_server: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_reply, "START_SECONDS", 0.05)
    server = open_server()
    with server.client() as client, client.stream("POST", CHAT, json=STREAM) as reply:
        assert reply.status_code == 200
        (job,) = server.wait_for_jobs()
        server.finish(job, error="the engine refused")
        content = "".join(reply.iter_text())
    assert content == (
        'data: {"error":{"message":"the engine refused","type":"invalid_request_error",'
        '"param":null,"code":null}}\n\n'
    )


def test_error_before_the_start(open_server: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_reply, "START_SECONDS", TIMEOUT_SECONDS)
    server = open_server()
    with server.client() as client, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.post, CHAT, json=STREAM)
        (job,) = server.wait_for_jobs()
        server.finish(job, error="the engine refused")
        reply = waiting.result(TIMEOUT_SECONDS)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "the engine refused"


def test_timeout(open_server: Open) -> None:
    server = open_server(inference_seconds=0.2)
    with server.client() as client:
        reply = client.post(CHAT, json=BODY)
    assert reply.status_code == 504, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "timeout")
    eventually(lambda: server.states() == {JobState.FAILED}, TIMEOUT_SECONDS)


def check_retry_later(reply: httpx.Response, status: int, kind: str, code: str) -> None:
    reply.read()
    assert reply.status_code == status, reply.text
    assert int(reply.headers["retry-after"]) >= 1
    assert int(reply.headers["retry-after-ms"]) >= 1
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == (kind, code)


def test_limits_of_streams(open_server: Open) -> None:
    server = open_server(inference_max_streams=2)
    with ExitStack() as stack:
        alice, bob = (stack.enter_context(server.client(key)) for key in (KEY, OTHER_KEY))
        for client in (alice, bob):
            reply = stack.enter_context(client.stream("POST", CHAT, json=STREAM))
            assert reply.status_code == 200
        reply = alice.post(CHAT, json=STREAM)
        check_retry_later(reply, 429, "rate_limit_error", "rate_limit_exceeded")
    eventually(lambda: server.states() == {JobState.FAILED}, TIMEOUT_SECONDS)
    # The places are free again.
    with server.client() as client, client.stream("POST", CHAT, json=STREAM) as reply:
        assert reply.status_code == 200


def test_full_server_of_streams(open_server: Open) -> None:
    server = open_server(inference_max_streams=1)
    with (
        server.client() as alice,
        server.client(OTHER_KEY) as bob,
        alice.stream("POST", CHAT, json=STREAM) as reply,
    ):
        assert reply.status_code == 200
        check_retry_later(bob.post(CHAT, json=STREAM), 503, "server_error", "overloaded")


def test_full_queue(open_server: Open) -> None:
    server = open_server(max_jobs_per_tenant=1)
    with (
        server.client() as alice,
        server.client(OTHER_KEY) as bob,
        ThreadPoolExecutor(2) as threads,
    ):
        waiting = [threads.submit(alice.post, CHAT, json=BODY)]
        server.wait_for_jobs()
        with server.client() as again:
            reply = again.post(CHAT, json=BODY)
        check_retry_later(reply, 429, "rate_limit_error", "rate_limit_exceeded")
        waiting.append(threads.submit(bob.post, CHAT, json=BODY))
        for job in server.wait_for_jobs(2):
            server.finish(job, "done")
        assert [each.result(TIMEOUT_SECONDS).status_code for each in waiting] == [200, 200]


def test_waiting_requests_block_no_others(open_server: Open) -> None:
    """More waiting requests than a tenant has slots: its other requests are still answered."""
    server = open_server()
    num_waiting = 12
    with server.client() as client, ThreadPoolExecutor(num_waiting) as threads:
        waiting = [threads.submit(client.post, CHAT, json=BODY) for _ in range(num_waiting)]
        server.wait_for_jobs(num_waiting)
        with server.client() as other:
            assert other.get("/v1/models").status_code == 200
            assert other.get("/api/v1/training_runs").status_code == 200
        for job in server.jobs():
            server.finish(job, "done")
        assert {each.result(TIMEOUT_SECONDS).status_code for each in waiting} == {200}


def test_prompts_of_one_request_end_together(open_server: Open) -> None:
    server = open_server()
    body = {"model": MODEL, "prompt": ["a", "b", "c"]}
    with server.client() as client, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.post, "/v1/completions", json=body)
        first, *_ = server.wait_for_jobs(3)
        server.finish(first, error="no")
        assert waiting.result(TIMEOUT_SECONDS).status_code == 400
    eventually(lambda: server.states() == {JobState.FAILED}, TIMEOUT_SECONDS)


def test_no_base_model_yet(open_server: Open) -> None:
    server = open_server()
    server.services.database.write(clear_base_models)
    with server.client() as client:
        check_retry_later(client.post(CHAT, json=BODY), 503, "server_error", "overloaded")


def test_stop_of_the_server(open_server: Open) -> None:
    server = open_server()
    with server.client() as client, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.post, CHAT, json=BODY)
        server.wait_for_jobs()
        server.services.waiters.release_all()
        check_retry_later(waiting.result(TIMEOUT_SECONDS), 503, "server_error", "overloaded")


def test_turned_off(open_server: Open) -> None:
    server = open_server(inference=False)
    with server.client() as client:
        assert client.post(CHAT, json=BODY).status_code == 404
        assert client.get("/api/v1/training_runs").status_code == 200
