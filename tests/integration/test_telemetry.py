"""Telemetry: off by default, without secrets, never blocking."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.conftest import (
    BASE_MODEL,
    KEY,
    PROMPT,
    SHORT,
    TIMEOUT_SECONDS,
    Connect,
    Events,
    Serve,
    eventually,
)
from tinkex import AdamParams, APIStatusError, RequestDone, ServiceClient
from tinkex.client.telemetry import Telemetry
from tinkex.testing import Fault, StubServer

ADAM = AdamParams(learning_rate=0.1)


def reporter(service: ServiceClient) -> Telemetry:
    telemetry = service.get_telemetry()
    assert telemetry is not None
    return telemetry


def events(server: StubServer) -> list[dict[str, Any]]:
    return [event for call in server.calls("telemetry") for event in call.message["events"]]


@pytest.fixture
def service(server: StubServer, connect: Connect) -> Iterator[ServiceClient]:
    made = connect(server, telemetry=True)
    made.create_lora_training_client(BASE_MODEL)
    return made


# --- off --------------------------------------------------------------------------------------


def test_telemetry_is_off_by_default(server: StubServer, connect: Connect) -> None:
    """No telemetry call, even after errors."""
    with connect(server, max_retries=0) as service:
        assert service.get_telemetry() is None
        client = service.create_lora_training_client(BASE_MODEL)
        server.inject("optim_step", Fault(status=500))
        assert client.optim_step(ADAM).exception(TIMEOUT_SECONDS) is not None
    assert server.calls("telemetry") == []


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("true", True), ("0", False)])
def test_environment_can_enable_telemetry(
    server: StubServer, monkeypatch: pytest.MonkeyPatch, value: str, is_on: bool
) -> None:
    monkeypatch.setenv("TINKEX_TELEMETRY", value)
    with ServiceClient(base_url=server.url, api_key=KEY) as service:
        service.create_lora_training_client(BASE_MODEL)
    assert bool(server.calls("telemetry")) is is_on


# --- on ---------------------------------------------------------------------------------------


def test_batches_are_limited_and_counted(server: StubServer, service: ServiceClient) -> None:
    telemetry = reporter(service)
    for number in range(250):
        assert telemetry.log("tick", {"number": number}, severity="DEBUG")
    service.close().result(TIMEOUT_SECONDS)
    calls = server.calls("telemetry")
    assert [len(call.message["events"]) for call in calls] == [100, 100, 52]
    received = events(server)
    assert [event["event_session_index"] for event in received] == list(range(252))
    assert [received[0]["event"], received[-1]["event"]] == ["SESSION_START", "SESSION_END"]
    assert {event["event"] for event in received[1:-1]} == {"GENERIC_EVENT"}
    assert received[1]["event_data"] == {"number": "0"}
    assert len({event["event_id"] for event in received}) == 252
    (session_id,) = server.sessions
    assert {call.message["session_id"] for call in calls} == {session_id}
    assert len({call.message["process_uuid"] for call in calls}) == 1
    assert {call.message["sdk_version"] for call in calls} == {"0.36.0"}
    assert (telemetry.num_delivered, telemetry.num_dropped) == (252, 0)


def test_events_of_many_threads_get_unique_indexes(
    server: StubServer, service: ServiceClient
) -> None:
    telemetry = reporter(service)

    def work() -> None:
        for _ in range(50):
            telemetry.log("tick")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    service.close().result(TIMEOUT_SECONDS)
    assert [event["event_session_index"] for event in events(server)] == list(range(202))


def test_single_timer_flushes(
    server: StubServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush must not start another timer."""
    monkeypatch.setattr("tinkex.client.telemetry.FLUSH_SECONDS", 0.1)
    service = connect(server, telemetry=True)
    service.create_lora_training_client(BASE_MODEL)
    telemetry = reporter(service)
    for number in range(1, 6):
        eventually(lambda wanted=number: telemetry.num_delivered == wanted)  # type: ignore[misc]
        telemetry.log("tick")
    eventually(lambda: telemetry.num_delivered == 6)
    times = [call.arrived_at for call in server.calls("telemetry")]
    assert times[-1] - times[0] >= 0.1 * (len(times) - 1) * 0.8
    # Telemetry requests create no events: only five ticks and the start.
    assert len(events(server)) == 6


# --- secrets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["tml-0123456789abcdef", "a-local-key-without-prefix"])
@pytest.mark.parametrize("pjwt", [False, True])
def test_bodies_contain_no_secret(serve: Serve, connect: Connect, key: str, pjwt: bool) -> None:
    """Even if the server quotes the key or the user logs an exception."""
    server = serve(api_keys={key}, client_config={"pjwt_auth_enabled": pjwt})
    secret_header = "bearer-of-secrets"
    service = connect(
        server,
        api_key=key,
        telemetry=True,
        max_retries=0,
        default_headers_overrides={"x-proxy-auth": secret_header},
    )
    client = service.create_lora_training_client(BASE_MODEL)
    sent = client.optim_step(ADAM)
    sent.result(TIMEOUT_SECONDS)
    tokens = {call.api_key for call in server.calls() if call.api_key}
    quoted = " ".join([key, secret_header, *tokens])
    telemetry = reporter(service)
    for endpoint, status in (("optim_step", 400), ("retrieve_future", 404), ("get_sampler", 401)):
        server.inject(endpoint, Fault(status=status, body={"detail": f"not with {quoted}"}))
        error = (
            service.rest_client().get_sampler("none").exception(TIMEOUT_SECONDS)
            if endpoint == "get_sampler"
            else client.optim_step(ADAM).exception(TIMEOUT_SECONDS)
        )
        assert isinstance(error, APIStatusError)
        telemetry.log_exception(error)
        telemetry.log(f"failed with {quoted}", {quoted: error, "request": error.request})
    service.close().result(TIMEOUT_SECONDS)
    # Start and end, two events logged by the test, and two failed operations.
    assert len(events(server)) == 2 + 6 + 2
    for call in server.calls("telemetry"):
        text = call.body.decode()
        for secret in (key, secret_header, *tokens):
            assert secret not in text
        assert "eyJ" not in text


# --- telemetry never blocks -------------------------------------------------------------------


def test_missing_endpoint_is_called_once(server: StubServer, connect: Connect) -> None:
    """The official client needs 30 s more for each exception."""
    server.inject("telemetry", Fault(status=404), times=None)
    with connect(server, telemetry=True, max_retries=0) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        server.inject("optim_step", Fault(status=400, body={"detail": "no"}))
        started = time.monotonic()
        error = client.optim_step(ADAM).exception(TIMEOUT_SECONDS)
        assert error is not None
        reporter(service).log_exception(error)
    assert time.monotonic() - started < 25.0
    assert len(server.calls("telemetry")) == 1
    assert not reporter(service).log("dropped")


def test_failing_endpoint_keeps_events(
    server: StubServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unacknowledged events are sent again and counted once."""
    monkeypatch.setattr("tinkex.client.telemetry.FLUSH_SECONDS", 0.05)
    server.inject("telemetry", Fault(status=503), times=2)
    service = connect(server, telemetry=True)
    service.create_lora_training_client(BASE_MODEL)
    telemetry = reporter(service)
    telemetry.log("tick")
    eventually(lambda: telemetry.num_delivered == 2)
    tried = server.calls("telemetry")
    assert len(tried) >= 3
    assert tried[0].message["events"][0] == tried[2].message["events"][0]


def test_hung_endpoint_delays_nothing(
    server: StubServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.telemetry.DRAIN_SECONDS", 0.2)
    server.inject("telemetry", Fault(delay_seconds=60.0), times=None)
    service = connect(server, telemetry=True)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    assert sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS).sequences
    # The session is finished first; then the final flush has a short time limit.
    closed = service.close()
    server.wait_for("finish_session")
    closed.result(TIMEOUT_SECONDS)
    assert reporter(service).num_delivered == 0


def test_full_queue_drops_events(
    server: StubServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.telemetry.QUEUE_SIZE", 10)
    service = connect(server, telemetry=True)
    service.create_lora_training_client(BASE_MODEL)
    telemetry = reporter(service)

    def is_full() -> bool:
        return not telemetry.log("tick")

    eventually(is_full)
    assert telemetry.num_dropped >= 1


def test_event_hook_works_without_telemetry(server: StubServer, connect: Connect) -> None:
    """The event hook is local and sends nothing."""
    hook = Events()
    connect(server, event_hook=hook).create_lora_training_client(BASE_MODEL)
    hook.wait_for(1, RequestDone, endpoint="create_model")
    assert server.calls("telemetry") == []
