"""Polling for results: outages, failures, billing issues and time limits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.integration.conftest import BASE_MODEL, TIMEOUT_SECONDS, Connect, Events, Serve
from tinkex import (
    AdamParams,
    APITimeoutError,
    BillingError,
    InternalServerError,
    QueueChanged,
    RequestFailedError,
    ServiceClient,
    TrainingClient,
)
from tinkex.errors import RequestErrorCategory
from tinkex.testing import Fault, StubServer

ADAM = AdamParams(learning_rate=0.1)


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client(BASE_MODEL)


def polled_id(server: StubServer, number: int) -> str:
    """The request id of the n-th promise that was polled; the first one creates the model."""
    polls = server.calls("retrieve_future")
    return list(dict.fromkeys(call.message["request_id"] for call in polls))[number - 1]


def waits(server: StubServer, number: int) -> list[float]:
    """The pauses between polls of the n-th promise."""
    request_id = polled_id(server, number)
    times = [
        call.arrived_at
        for call in server.calls("retrieve_future")
        if call.message["request_id"] == request_id
    ]
    return [later - sooner for sooner, later in itertools.pairwise(times)]


@pytest.mark.parametrize(("status", "times", "least"), [(408, 4, 1.1), (503, 2, 1.1)])
def test_immediate_responses_back_off(
    server: StubServer, client: TrainingClient, status: int, times: int, least: float
) -> None:
    """The official client polls 67 times in 3 s."""
    server.inject("retrieve_future", Fault(status=status), times=times)
    client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    pauses = waits(server, 2)
    assert len(pauses) == times
    assert sum(pauses) >= least
    assert pauses[-1] > 1.4 * pauses[0]


def test_server_without_long_polling_is_not_flooded(serve: Serve, connect: Connect) -> None:
    server = serve(long_poll_seconds=0.0, work_seconds=0.5)
    connect(server).create_lora_training_client(BASE_MODEL)
    assert len(server.calls("retrieve_future")) <= 6


def test_poll_retry_after_is_honoured(server: StubServer, service: ServiceClient) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    paused = {"type": "try_again", "retry_after_ms": 300, "queue_state": "active"}
    server.inject("retrieve_future", Fault(status=200, body=paused))
    server.inject("retrieve_future", Fault(status=429, headers={"retry-after-ms": "600"}))
    client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    first, second = waits(server, 2)
    assert first >= 0.3
    assert second >= 0.6


def test_500_with_reason_fails_after_a_few_polls(
    server: StubServer, service: ServiceClient
) -> None:
    """Some servers report a failed job this way; the official client polls without end."""
    client = service.create_lora_training_client(BASE_MODEL)
    server.inject("retrieve_future", Fault(status=500, body={"detail": "it broke"}), times=None)
    with pytest.raises(InternalServerError, match="it broke"):
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    assert len(waits(server, 2)) == 3


def test_polling_gives_up_after_outage_limit(server: StubServer, connect: Connect) -> None:
    client = connect(server, outage_seconds=0.3).create_lora_training_client(BASE_MODEL)
    server.inject("retrieve_future", Fault(status=503, body={"detail": "away"}), times=None)
    with pytest.raises(InternalServerError, match="away"):
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    ("word", "category"),
    [
        ("user", RequestErrorCategory.User),
        ("server", RequestErrorCategory.Server),
        ("SERVER", RequestErrorCategory.Server),
        ("unknown", RequestErrorCategory.Unknown),
        ("martian", RequestErrorCategory.Unknown),
        (None, RequestErrorCategory.Unknown),
    ],
)
def test_failed_job_raises_immediately_with_category(
    server: StubServer, client: TrainingClient, word: str | None, category: RequestErrorCategory
) -> None:
    """A bare error is recognised after one poll."""
    body = {"error": "it failed"} | ({} if word is None else {"category": word})
    server.inject("retrieve_future", Fault(status=200, body=body), times=None)
    with pytest.raises(RequestFailedError, match="it failed") as caught:
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    assert caught.value.category is category
    assert caught.value.request_id == polled_id(server, 2)
    assert caught.value.is_user_error is (category is RequestErrorCategory.User)
    assert waits(server, 2) == []


@pytest.mark.parametrize(
    "body",
    [
        {"status": "failed", "error": "no"},
        {"status": "failed"},
        {"error": {"message": "no"}, "category": "user"},
    ],
)
def test_failure_status_variants(
    server: StubServer, client: TrainingClient, body: dict[str, Any]
) -> None:
    server.inject("retrieve_future", Fault(status=200, body=body))
    with pytest.raises(RequestFailedError):
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    "body",
    [{"metrics": {"step": 5.0}}, {"status": "completed", "result": {"metrics": {"step": 5.0}}}],
)
def test_success_status_variants(
    server: StubServer, client: TrainingClient, body: dict[str, Any]
) -> None:
    server.inject("retrieve_future", Fault(status=200, body=body))
    assert client.optim_step(ADAM).result(TIMEOUT_SECONDS).metrics == {"step": 5.0}


def test_billing_issue_pauses_then_raises(server: StubServer, connect: Connect) -> None:
    """The official client waits for an hour without a message."""
    client = connect(server, billing_pause_seconds=0.5).create_lora_training_client(BASE_MODEL)
    unpaid = Fault(status=402, body={"detail": "no funds"})
    server.inject("retrieve_future", unpaid)
    assert client.optim_step(ADAM).result(TIMEOUT_SECONDS).metrics
    server.inject("retrieve_future", unpaid, times=None)
    with pytest.raises(BillingError, match="no funds") as caught:
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    assert "billing" in (caught.value.hint or "")
    assert sum(waits(server, 3)) >= 0.5


def test_billing_issue_can_raise_immediately(server: StubServer, connect: Connect) -> None:
    client = connect(server, billing_pause_seconds=0.0).create_lora_training_client(BASE_MODEL)
    server.inject("retrieve_future", Fault(status=402), times=None)
    with pytest.raises(BillingError):
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    assert waits(server, 2) == []


# --- time limits ------------------------------------------------------------------------------


def test_poll_timeout_limits_wait(serve: Serve, connect: Connect) -> None:
    """Also during a long poll, which here would take a minute."""
    server = serve(long_poll_seconds=60.0)
    server.inject("retrieve_future", Fault(delay_seconds=60.0), times=None)
    service = connect(server, poll_timeout_seconds=0.3)
    with pytest.raises(APITimeoutError, match=r"No result for .* within 0\.3 s"):
        service.create_lora_training_client(BASE_MODEL)


def test_timed_out_poll_is_repeated(serve: Serve, connect: Connect) -> None:
    server = serve()
    server.inject("retrieve_future", Fault(delay_seconds=60.0), times=2)
    service = connect(server, poll_request_seconds=0.1)
    assert service.create_lora_training_client(BASE_MODEL).model_id
    assert len(server.calls("retrieve_future")) == 3


# --- the server's queue -----------------------------------------------------------------------


def test_paused_queue_is_reported_once_and_slows_polls(
    server: StubServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events()
    client = connect(server, event_hook=events).create_lora_training_client(BASE_MODEL)
    paused = {"queue_state": "PAUSED_CAPACITY", "queue_state_reason": "no machines"}
    server.inject("retrieve_future", Fault(status=408, body=paused))
    client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    (change,) = events.wait_for(1, QueueChanged)
    assert (change.client, change.state, change.reason) == (
        client.model_id,
        "paused_capacity",
        "no machines",
    )
    assert len(events.of(QueueChanged)) == 1
    assert waits(server, 2)[0] >= 1.0
    assert [record.getMessage() for record in caplog.records].count(
        f"Training of {client.model_id} is paused: no machines"
    ) == 1
