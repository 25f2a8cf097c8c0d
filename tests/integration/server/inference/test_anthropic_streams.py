"""Streams of Anthropic's API while tokens are generated: order, silence, limits, disconnects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest

from tests.integration.server.inference.conftest import KEY, TIMEOUT_SECONDS
from tinkex.server.inference import inference_reply
from tinkex.store import jobs
from tinkex.store.records import JobRecord
from tinkex.testing import SCRIPTED, StubServer, say, scripted_model

HEADERS = {"x-api-key": KEY}
LONG = "one two three four five six seven eight nine ten " * 4


@contextmanager
def slow_server(**settings: Any) -> Iterator[StubServer]:
    """A server that takes its time for each token."""
    server = StubServer(api_keys=[KEY], models=[scripted_model()], seconds_per_token=0.02)
    server._config = replace(server._config, **settings)
    with server:
        yield server


def question(answer: str = LONG) -> dict[str, Any]:
    messages = [{"role": "user", "content": say(answer)}]
    return {"model": SCRIPTED, "max_tokens": 400, "messages": messages}


def connect(server: StubServer, **options: Any) -> anthropic.Anthropic:
    given = {"api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_SECONDS} | options
    return anthropic.Anthropic(base_url=server.url, **given)


def wait_for_end(server: StubServer, job_id: str) -> JobRecord:
    """Wait until a job has ended; the limit is less than an answer would take."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with server._open_database() as database:
        while time.monotonic() < deadline:
            job = database.read(lambda db: jobs.find(db, job_id))
            assert job is not None
            if job.is_finished:
                return job
            time.sleep(0.01)
    raise AssertionError(f"the job is still {job.state}")


def test_text_arrives_while_it_is_generated() -> None:
    with slow_server() as server, connect(server) as client:
        with client.messages.stream(**question()) as stream:
            arrived = [(event.type, time.monotonic()) for event in stream]
            final = stream.get_final_message()
        assert final.content[0].text == LONG
        times = [at for kind, at in arrived if kind == "text"]
        assert len(times) > 10
        assert times[-1] - times[0] > 0.5, "not in one piece at the end"


def test_the_end_of_a_connection_cancels_its_stream() -> None:
    with slow_server() as server:
        body = question() | {"stream": True}
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, headers=HEADERS) as reply:
            next(reply.iter_bytes())
        job = wait_for_end(server, reply.headers["request-id"])
        assert (job.state, job.error) == ("failed", "the request was cancelled")


def test_the_end_of_a_connection_cancels_an_answer_that_is_not_streamed() -> None:
    with slow_server() as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/messages", json=question(), headers=HEADERS, timeout=1.0)
        with server._open_database() as database:
            (job_id,) = database.read(list_job_ids)
        assert wait_for_end(server, job_id).state == "failed"


def list_job_ids(db: Any) -> list[str]:
    return [str(row[0]) for row in db.exec_driver_sql("SELECT id FROM jobs")]


def test_silence_is_filled_with_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_reply, "KEEP_ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(inference_reply, "START_SECONDS", 0.02)
    server = StubServer(api_keys=[KEY], models=[scripted_model()], work_seconds=0.4)
    with server, connect(server) as client:
        with client.messages.stream(**question("Good day.")) as stream:
            assert stream.get_final_message().content[0].text == "Good day."
        reply = httpx.post(
            f"{server.url}/v1/messages",
            json=question("Good day.") | {"stream": True},
            headers=HEADERS,
            timeout=TIMEOUT_SECONDS,
        )
        before, _, after = reply.text.partition("event: message_start\n")
        assert before.count('event: ping\ndata: {"type":"ping"}\n\n') >= 3
        assert after.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


def test_retries_after_too_many_streams() -> None:
    with slow_server(inference_max_streams=2) as server, connect(server) as client:
        opened = client.messages.create(**question(), stream=True)
        next(iter(opened))
        with pytest.raises(anthropic.RateLimitError) as caught:
            client.messages.create(**question("Good day."), stream=True)
        assert caught.value.type == "rate_limit_error"
        assert float(caught.value.response.headers["retry-after"]) >= 1
        statuses: list[int] = []

        def on_response(response: Any) -> None:
            statuses.append(response.status_code)
            opened.close()

        hooks = {"response": [on_response]}
        http_client = anthropic.DefaultHttpxClient(event_hooks=hooks)
        with (
            connect(server, http_client=http_client, max_retries=3) as patient,
            patient.messages.stream(**question("Good day.")) as stream,
        ):
            assert stream.get_final_message().content[0].text == "Good day."
        assert statuses == [429, 200]


def test_an_error_after_the_start_is_an_event() -> None:
    received: list[str] = []
    with (
        slow_server(inference_seconds=1.0) as server,
        connect(server) as client,
        pytest.raises(anthropic.APIStatusError, match="no answer within 1 s") as caught,
        client.messages.stream(**question()) as stream,
    ):
        received.extend(event.type for event in stream)
    assert caught.value.type == "timeout_error"
