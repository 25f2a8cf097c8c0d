"""Regression tests for known defects of other SDKs, over HTTP."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tinkex
from tests.integration.conftest import (
    BASE_MODEL,
    KEY,
    PROMPT,
    SHORT,
    TIMEOUT_SECONDS,
    Connect,
    Serve,
    datum,
    eventually,
)
from tinkex import SamplingClient, ServiceClient, TinkexError, TrainingClient, types
from tinkex.auth import raise_if_tinker_not_accessible
from tinkex.client import polling, remote_model
from tinkex.client.io_loop import IO_LOOP
from tinkex.testing import Call, Fault, StubServer

ADAM = tinkex.AdamParams(learning_rate=0.1)
BROKEN = Fault(status=500)
LOAD_FAILURE = Fault(status=400, body={"detail": "torn"})


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client(BASE_MODEL)


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL)


# --- order and threads ------------------------------------------------------------------------


def test_optim_step_does_not_overtake_custom_loss_backward(
    server: StubServer, client: TrainingClient
) -> None:
    """The call itself does not wait for the forward pass."""
    pytest.importorskip("torch")
    delayed = Fault(delay_seconds=2.0)
    kind = "x-tinker-request-type"
    server.inject("retrieve_future", delayed, match=lambda call: call.headers[kind] == "Forward")
    called_at = time.monotonic()
    client.forward_backward_custom([datum()], lambda _, rows: (-rows[0].sum(), {}))
    stepped = client.optim_step(ADAM)
    assert time.monotonic() - called_at < delayed.delay_seconds
    assert stepped.result(TIMEOUT_SECONDS).metrics["grad_norm"] > 0.0
    kinds = [(number, kind) for _, number, kind in server.executed]
    assert kinds == [(1, "forward"), (2, "forward_backward"), (3, "optim_step")]
    (step,) = server.calls("optim_step")
    assert step.arrived_at > server.calls("forward_backward")[1].arrived_at


def test_sample_returns_immediately_while_io_thread_is_busy(
    server: StubServer, sampler: SamplingClient
) -> None:
    """The caller never waits, and a sample takes exactly two requests."""
    before = len(server.calls())
    gate = threading.Event()
    IO_LOOP.post(gate.wait, TIMEOUT_SECONDS)
    started = time.monotonic()
    futures = [sampler.sample(PROMPT, 1, SHORT) for _ in range(100)]
    assert time.monotonic() - started < TIMEOUT_SECONDS / 2
    assert not any(future.done() for future in futures)
    gate.set()
    assert all(future.result(TIMEOUT_SECONDS).sequences for future in futures)
    endpoints = {call.endpoint for call in server.calls()[before:]} - {"session_heartbeat"}
    assert endpoints == {"asample", "retrieve_future"}
    assert len(server.calls("asample")) == 100


def test_batches_are_encoded_and_decoded_off_the_io_thread(
    client: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is encoded by its caller, a large result is decoded on a separate thread."""
    seen: list[str] = []

    def record_threads(module: ModuleType, name: str) -> None:
        work = getattr(module, name)

        def record_thread(*args: Any) -> Any:
            seen.append(threading.current_thread().name)
            return work(*args)

        monkeypatch.setattr(module, name, record_thread)

    record_threads(remote_model, "encode_forward_backward_request")
    record_threads(polling, "decode_result")
    output = client.forward([datum([1] * 2000)] * 50, "cross_entropy").result(TIMEOUT_SECONDS)
    assert (
        sum(row["logprobs"].nbytes for row in output.loss_fn_outputs)
        > polling.MIN_THREADED_DECODE_BYTES
    )
    encoded, decoded = seen
    assert encoded == threading.current_thread().name
    assert decoded not in {encoded, "tinkex-io", "tinkex-heartbeats"}


# --- client lifecycle -------------------------------------------------------------------------


def test_closing_clients_does_not_affect_others(
    server: StubServer, sampler: SamplingClient, connect: Connect
) -> None:
    """In an earlier SDK, four closes within seconds stopped the shared loop."""
    closed: list[ServiceClient] = []
    for _ in range(6):
        with connect(server, heartbeat_seconds=0.01) as service:
            service.create_sampling_client(base_model=BASE_MODEL)
        closed.append(service)
    num_beats = len(server.heartbeats())
    assert sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS).sequences
    for service in closed:
        with pytest.raises(tinkex.ClientClosed):
            service.health()
    time.sleep(0.05)
    assert (len(server.sessions), len(server.heartbeats())) == (7, num_beats)


def test_heartbeat_failure_is_logged_once(
    server: StubServer,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In an earlier SDK, heartbeats got 404 for months without any message."""
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_WARNING_SECONDS", 0.1)
    server.inject("session_heartbeat", Fault(status=404), times=None)
    connect(server, heartbeat_seconds=0.02).create_lora_training_client(BASE_MODEL)
    eventually(lambda: "No heartbeat of session" in caplog.text)
    server.wait_for("session_heartbeat", len(server.calls("session_heartbeat")) + 5)
    assert caplog.text.count("No heartbeat of session") == 1


def test_session_messages_are_logged(
    server: StubServer, service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    messages = {"info_message": "hello", "warning_message": "old SDK", "error_message": "no funds"}
    server.inject("create_session", Fault(status=200, body={"session_id": "s", **messages}))
    with pytest.raises(tinkex.NotFoundError):  # the session does not exist
        service.create_lora_training_client(BASE_MODEL)
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    for level, text in (("INFO", "hello"), ("WARNING", "old SDK"), ("ERROR", "no funds")):
        assert (level, f"Message from the server: {text}") in logged


def test_clients_of_one_service_read_flags_once(server: StubServer, service: ServiceClient) -> None:
    """Also if all clients start concurrently."""

    async def use_it() -> None:
        await asyncio.gather(
            service.create_lora_training_client_async(BASE_MODEL),
            service.create_sampling_client_async(base_model=BASE_MODEL),
            service.get_server_capabilities_async(),
            service.rest_client().list_sessions_async(),
        )

    asyncio.run(use_it())
    assert len(server.calls("client_config")) == 1
    assert len(server.calls("create_session")) == 1


@pytest.mark.parametrize("endpoint", ["client_config", "get_server_capabilities"])
def test_accessibility_check_is_not_retried(
    server: StubServer, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    """The official function documents one request and sends up to eleven."""
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    server.inject(endpoint, BROKEN, times=None)
    with pytest.raises(tinkex.InternalServerError):
        raise_if_tinker_not_accessible()
    assert len(server.calls(endpoint)) == 1
    server.clear_faults()
    raise_if_tinker_not_accessible()


# --- model creation ---------------------------------------------------------------------------


def test_create_model_may_return_result_immediately(
    server: StubServer, service: ServiceClient
) -> None:
    """A future is polled; a result is used directly."""
    at_once = {"model_id": "made-at-once", "type": "create_model"}
    server.inject("create_model", Fault(status=200, body=at_once))
    assert service.create_lora_training_client(BASE_MODEL).model_id == "made-at-once"
    assert server.calls("retrieve_future") == []
    service.create_lora_training_client(BASE_MODEL)
    assert len(server.calls("retrieve_future")) == 1


def test_slow_model_creation_is_awaited(serve: Serve, connect: Connect) -> None:
    """The request timeout does not limit waiting for a model."""
    server = serve(work_seconds=0.6, long_poll_seconds=0.1)
    assert connect(server, timeout_seconds=0.3).create_lora_training_client(BASE_MODEL).model_id
    server.inject("create_sampling_session", Fault(delay_seconds=0.6), times=None)
    patient = connect(server, timeout_seconds=10.0)
    assert patient.create_sampling_client(base_model=BASE_MODEL).sampling_session_id
    hasty = connect(server, timeout_seconds=0.1, outage_seconds=0.0)
    with pytest.raises(tinkex.APITimeoutError) as caught:
        hasty.create_sampling_client(base_model=BASE_MODEL)
    assert "timeout_seconds" in (caught.value.hint or "")


@pytest.fixture
def path(client: TrainingClient) -> str:
    return client.save_state("a").result(TIMEOUT_SECONDS).path


def test_failed_load_leaves_no_client_state(
    server: StubServer, service: ServiceClient, path: str
) -> None:
    """No client and no task remain; a missing checkpoint creates no model."""
    with pytest.raises(tinkex.NotFoundError):
        service.create_training_client_from_state(f"{path}-not")
    assert len(server.calls("create_model")) == 1
    server.inject("load_weights", LOAD_FAILURE)
    num_alive = _num_clients()
    with pytest.raises(TinkexError, match="torn"):
        service.create_training_client_from_state(path)
    eventually(lambda: not service._holder._tasks and _num_clients() == num_alive)
    assert service.create_training_client_from_state(path).model_id


def _num_clients() -> int:
    gc.collect()
    return sum(type(found) is TrainingClient for found in gc.get_objects())


def test_failed_load_unloads_model(server: StubServer, service: ServiceClient, path: str) -> None:
    server.inject("load_weights", LOAD_FAILURE)
    with pytest.raises(TinkexError, match="torn"):
        service.create_training_client_from_state(path)
    eventually(lambda: len(server.calls("unload_model")) == 1, seconds=0.5)


@pytest.mark.parametrize("name", ["from_state", "from_state_with_optimizer"])
@pytest.mark.parametrize("token", [None, "tml-foreign"])
def test_sync_and_async_creation_send_same_requests(
    serve: Serve, connect: Connect, name: str, token: str | None
) -> None:
    """The official sync version sends the raw token, the async one the exchanged token."""
    server = serve(api_keys={KEY, "tml-foreign"}, client_config={"pjwt_auth_enabled": True})
    owner = connect(server, api_key=token or KEY)
    path = (
        owner.create_lora_training_client(BASE_MODEL).save_state("a").result(TIMEOUT_SECONDS).path
    )
    sent: list[list[tuple[Any, ...]]] = []
    for suffix in ("", "_async"):
        service = connect(server)
        create = getattr(service, f"create_training_client_{name}{suffix}")
        before = len(server.calls())
        made = create(path, weights_access_token=token)
        assert isinstance(asyncio.run(made) if suffix else made, TrainingClient)
        sent.append([_shown(call) for call in server.calls()[before:] if call.method == "POST"])
    assert sent[0] == sent[1]
    assert [call[0] for call in sent[0]].count("load_weights") == 1


def _shown(call: Call) -> tuple[Any, ...]:
    """Return a call without the values that differ between sessions."""
    varied = ("session_id", "model_id", "request_id")
    message = {name: text for name, text in (call.message or {}).items() if name not in varied}
    key = call.api_key if not (call.api_key or "").startswith("eyJ") else "a token"
    return call.endpoint, key, message


# --- on the wire ------------------------------------------------------------------------------


def test_unset_fields_are_not_sent(
    server: StubServer, service: ServiceClient, client: TrainingClient
) -> None:
    """Servers answer null with 422 or 500. (Removing a TTL is the only use of null.)"""
    client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    path = client.save_state("a").result(TIMEOUT_SECONDS).path
    service.create_training_client_from_state(path)
    sampler = client.save_weights_and_get_sampling_client()
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    service.rest_client().copy_weights(path).result(TIMEOUT_SECONDS)
    service.close().result(TIMEOUT_SECONDS)
    bodies = [(call.endpoint, call.body) for call in server.calls() if not call.is_proto]
    assert len({name for name, _ in bodies}) >= 10
    assert [name for name, body in bodies if b"null" in body] == []


@pytest.mark.parametrize("status", [200, 204])
def test_delete_accepts_empty_response(
    server: StubServer, service: ServiceClient, status: int
) -> None:
    server.inject("delete_checkpoint", Fault(status=status, body=b""))
    rest = service.rest_client()
    assert rest.delete_checkpoint("s:train:0", "weights/a").result(TIMEOUT_SECONDS) is None
    (call,) = server.calls("delete_checkpoint")
    assert call.path == "/api/v1/training_runs/s:train:0/checkpoints/weights/a"


def test_training_results_are_typed(client: TrainingClient) -> None:
    futures: dict[Any, type[Any]] = {
        client.forward([datum()], "cross_entropy"): types.ForwardBackwardOutput,
        client.optim_step(ADAM): types.OptimStepResponse,
        client.save_state("a"): types.SaveWeightsResponse,
        client.save_weights_for_sampler("a"): types.SaveWeightsForSamplerResponse,
        client.save_weights_external("a"): types.SaveWeightsExternalResponse,
    }
    assert {future: type(future.result(TIMEOUT_SECONDS)) for future in futures} == futures
    assert type(client.get_info().result()) is types.GetInfoResponse


def test_download_is_written_incrementally(
    server: StubServer, service: ServiceClient, tmp_path: Path
) -> None:
    """The server sends the second half only after progress of the first was reported."""
    half, go_on = bytes(4 << 20), threading.Event()

    def send_in_halves() -> None:
        line, _ = listener.accept()
        with line:
            line.recv(65536)
            line.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (2 * len(half)))
            line.sendall(half)
            line.sendall(half if go_on.wait(TIMEOUT_SECONDS / 2) else b"")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=send_in_halves, daemon=True).start()
        urls = {"weights": f"http://127.0.0.1:{listener.getsockname()[1]}/weights"}
        # URLs that expire soon are requested again.
        expires = datetime.now(UTC) + timedelta(hours=1)
        answer = {"urls": urls, "expires": expires.isoformat()}
        server.inject("external_weights_urls", Fault(status=200, body=answer))
        got = service.rest_client().download_checkpoint(
            "tinker://r/external_weights/a",
            tmp_path / "x",
            progress=lambda done, total: go_on.set() if done else None,
        )
        assert (got.result(TIMEOUT_SECONDS) / "weights").stat().st_size == 2 * len(half)


# --- progress ---------------------------------------------------------------------------------

SHORT_PROGRESS = tinkex.RetryConfig(
    progress_timeout=0.8, retry_delay_base=0.05, retry_delay_max=0.05
)


@pytest.fixture
def failing_sampler(server: StubServer, connect: Connect) -> SamplingClient:
    """Its first sample fails for 1.6 s; it gives up after 0.8 s without progress."""
    service = connect(server, max_retries=1000)
    sampler = service.create_sampling_client(base_model=BASE_MODEL, retry_config=SHORT_PROGRESS)
    end = time.monotonic() + 1.6

    def is_first(call: Call) -> bool:
        return bool(call.message["seq_id"] == 0) and call.arrived_at < end

    server.inject("asample", BROKEN, times=None, match=is_first)
    return sampler


def test_progress_of_other_requests_resets_stall_timer(failing_sampler: SamplingClient) -> None:
    """The timeout limits the time without progress, not the total time."""
    slow = failing_sampler.sample(PROMPT, 1, SHORT)
    while not slow.done():
        failing_sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
        time.sleep(0.02)
    assert slow.result(TIMEOUT_SECONDS).sequences


def test_stall_timeout_excludes_idle_time(
    server: StubServer, failing_sampler: SamplingClient
) -> None:
    """After an idle hour the first two attempts are still made."""
    time.sleep(1.0)
    server.inject("asample", BROKEN, times=None)
    with pytest.raises(tinkex.InternalServerError):
        failing_sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    times = [call.arrived_at for call in server.calls("asample")]
    assert len(times) > 2
    assert times[-1] - times[0] > 0.5
