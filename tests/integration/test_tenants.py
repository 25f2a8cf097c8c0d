"""Several service clients in one process are independent."""

from __future__ import annotations

import pytest

from tests.integration.conftest import (
    BASE_MODEL,
    HELLO,
    PROMPT,
    SHORT,
    TIMEOUT_SECONDS,
    Connect,
    Events,
    Serve,
    base_logprobs,
    datum,
)
from tinkex import (
    AdamParams,
    ClientClosed,
    InternalServerError,
    NotFoundError,
    RateLimitError,
    RequestDone,
    RetryConfig,
    SamplingClient,
    ServiceClient,
    Timing,
)
from tinkex.testing import Fault, StubServer

RED, BLUE = "tml-red", "tml-blue"
NUM_SAMPLES = 120
ONCE = RetryConfig(enable_retry_logic=False)


class Tenant:
    """One user: a key, a client, and the events of its hook."""

    def __init__(self, connect: Connect, server: StubServer, key: str) -> None:
        self.key = key
        self.events = Events()
        self.service: ServiceClient = connect(server, api_key=key, event_hook=self.events)

    def sampler(self, retry: RetryConfig | None = None) -> SamplingClient:
        return self.service.create_sampling_client(base_model=BASE_MODEL, retry_config=retry)


def work(tenant: Tenant, learning_rate: float) -> tuple[float, int]:
    """Train a step, sample from the result, and return the loss."""
    client = tenant.service.create_lora_training_client(BASE_MODEL)
    client.forward_backward([datum()] * 3, "cross_entropy")
    client.optim_step(AdamParams(learning_rate=learning_rate))
    after = client.forward([datum()], "cross_entropy")
    sampler = client.save_weights_and_get_sampling_client()
    futures = [sampler.sample(PROMPT, 1, SHORT) for _ in range(NUM_SAMPLES)]
    num_sampled = sum(len(future.result(TIMEOUT_SECONDS).sequences) for future in futures)
    return after.result(TIMEOUT_SECONDS).metrics["loss:sum"], num_sampled


def check_events(tenant: Tenant) -> None:
    """Assert one event per operation and per request, including retries."""
    samples = tenant.events.wait_for(NUM_SAMPLES, Timing, operation="sample")
    assert len(samples) == NUM_SAMPLES
    assert all(timing.ok for timing in samples)
    tenant.events.wait_for(NUM_SAMPLES, RequestDone, endpoint="asample", status=200)
    for operation in ("forward_backward", "optim_step", "forward", "save_weights_for_sampler"):
        tenant.events.wait_for(1, Timing, operation=operation)
        assert len(tenant.events.of(Timing, operation=operation)) == 1


def test_two_servers_are_isolated(serve: Serve, connect: Connect) -> None:
    servers = [serve(api_keys={RED}), serve(api_keys={BLUE})]
    tenants = [
        Tenant(connect, server, key) for server, key in zip(servers, (RED, BLUE), strict=True)
    ]
    losses = [work(tenant, rate) for tenant, rate in zip(tenants, (0.0, 1.0), strict=True)]
    base = -float(base_logprobs(HELLO).sum())
    assert losses[0] == (pytest.approx(base), NUM_SAMPLES)
    assert losses[1][0] < 0.9 * base
    for server, tenant in zip(servers, tenants, strict=True):
        check_events(tenant)
        assert {call.api_key for call in server.calls()} == {tenant.key}
        assert len(server.calls("asample")) == NUM_SAMPLES
        assert len(server.sessions) == 1


def test_two_keys_on_one_server_are_isolated(serve: Serve, connect: Connect) -> None:
    server = serve(api_keys={RED, BLUE})
    red, blue = (Tenant(connect, server, key) for key in (RED, BLUE))
    for tenant in (red, blue):
        work(tenant, 0.1)
        check_events(tenant)
    assert {session.tenant for session in server.sessions.values()} == {RED, BLUE}
    runs = red.service.rest_client().list_training_runs().result(TIMEOUT_SECONDS).training_runs
    (run,) = runs
    with pytest.raises(NotFoundError):
        blue.service.rest_client().get_training_run(run.training_run_id).result(TIMEOUT_SECONDS)


def test_429_of_one_key_does_not_delay_another(serve: Serve, connect: Connect) -> None:
    server = serve(api_keys={RED, BLUE})
    red, blue = (Tenant(connect, server, key) for key in (RED, BLUE))
    limited, free = red.sampler(ONCE), blue.sampler(ONCE)
    lanes = limited.holder.sampling_limits, free.holder.sampling_limits
    assert lanes[0] is not lanes[1]
    server.inject(
        "asample",
        Fault(status=429, headers={"retry-after": "30"}),
        times=None,
        match=lambda call: call.api_key == RED,
    )
    with pytest.raises(RateLimitError):
        limited.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    waiting = limited.sample(PROMPT, 1, SHORT)
    futures = [free.sample(PROMPT, 1, SHORT) for _ in range(100)]
    assert all(future.result(TIMEOUT_SECONDS).sequences for future in futures)
    assert lanes[0].limiter.remaining_seconds() > 5.0
    assert not lanes[1].limiter.is_backing_off()
    assert not waiting.done()
    assert sum(call.api_key == RED for call in server.calls("asample")) == 1
    # All clients with the same key and server share limits.
    assert connect(server, api_key=RED)._holder.sampling_limits is lanes[0]
    assert waiting.cancel()


def test_same_key_on_two_servers_has_separate_limits(serve: Serve, connect: Connect) -> None:
    first, second = (connect(serve(), api_key=RED) for _ in range(2))
    assert first._holder.sampling_limits is not second._holder.sampling_limits


def test_5xx_is_retried_on_training_and_polling_only(serve: Serve, connect: Connect) -> None:
    """Without retry logic, only the submission of a sample is not retried."""
    server = serve()
    tenant = Tenant(connect, server, RED)
    client = tenant.service.create_lora_training_client(BASE_MODEL)
    sampler = tenant.sampler(ONCE)
    for endpoint in ("optim_step", "retrieve_future", "asample"):
        server.inject(endpoint, Fault(status=500))
    assert client.optim_step(AdamParams()).result(TIMEOUT_SECONDS).metrics["step"] == 1.0
    assert len(server.calls("optim_step")) == 2
    (done,) = tenant.events.wait_for(1, RequestDone, endpoint="optim_step")
    assert (done.status, done.num_retries) == (200, 1)
    with pytest.raises(InternalServerError):
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert len(server.calls("asample")) == 1
    (failed,) = tenant.events.wait_for(1, Timing, operation="sample")
    assert not failed.ok


def test_session_id_can_be_read_before_any_work(serve: Serve, connect: Connect) -> None:
    service = connect(serve(), api_key=RED)
    session_id = service._holder.get_session_id()
    client = service.create_lora_training_client(BASE_MODEL)
    assert client.model_id.startswith(session_id)


def test_closing_one_client_leaves_other_working(serve: Serve, connect: Connect) -> None:
    """On one server, with one key, while all shared resources are in use."""
    server = serve()
    options = {"api_key": RED, "heartbeat_seconds": 0.02, "telemetry": True}
    first, second = connect(server, **options), connect(server, **options)
    old, new = (each.create_sampling_client(base_model=BASE_MODEL) for each in (first, second))
    client = second.create_lora_training_client(BASE_MODEL)
    old.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    first.close().result(TIMEOUT_SECONDS)
    with pytest.raises(ClientClosed):
        old.sample(PROMPT, 1, SHORT)
    assert new.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS).sequences
    assert client.optim_step(AdamParams()).result(TIMEOUT_SECONDS).metrics
    alive = second._holder.known_session_id
    assert alive is not None and second._holder.get_session_id() == alive
    num_beats = len(server.heartbeats(alive))
    server.wait_for("session_heartbeat", len(server.calls("session_heartbeat")) + 3)
    assert len(server.heartbeats(alive)) > num_beats
    assert list(server.finish_reasons) == [first._holder.known_session_id]
    telemetry = second.get_telemetry()
    assert telemetry is not None
    assert telemetry.log("still here")
    second.close().result(TIMEOUT_SECONDS)
    assert any(b"still here" in call.body for call in server.calls("telemetry"))


def test_clients_of_a_service_need_no_close(serve: Serve, connect: Connect) -> None:
    """Dropping a sampling client does not affect the others."""
    service = connect(serve())
    first = service.create_sampling_client(base_model=BASE_MODEL)
    second = service.create_sampling_client(base_model=BASE_MODEL)
    first.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    del first
    assert second.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS).sequences


def test_client_settings_are_independent(serve: Serve, connect: Connect) -> None:
    server = serve()
    first = connect(server, default_headers_overrides={"x-team": "red"}, user_metadata={"a": "1"})
    second = connect(server)
    first.get_server_capabilities()
    second.get_server_capabilities()
    teams = [call.headers.get("x-team") for call in server.calls("get_server_capabilities")]
    assert teams == ["red", None]
    second.create_lora_training_client(BASE_MODEL)
    (session,) = server.sessions.values()
    assert session.user_metadata == {}
