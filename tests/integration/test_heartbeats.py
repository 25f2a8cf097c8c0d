"""Heartbeats: user code does not delay them, and they stop with the session."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
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
    datum,
    eventually,
)
from tinkex import ForwardBackwardOutput, ServiceClient, TensorData, Timing
from tinkex.testing import Fault, StubServer
from tinkex.wire.proto import encode_forward_backward_output

INTERVAL = 0.02
#: Number of heartbeats that must arrive while user code blocks.
MIN_HEARTBEATS = 5


class Blocker:
    """User code that blocks until enough heartbeats arrived, or a long timeout."""

    def __init__(self, server: StubServer, pause: Callable[[], None]) -> None:
        self._server = server
        self._pause = pause
        self.num_beats = 0
        self.has_started = threading.Event()
        self.is_over = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, *args: Any) -> None:
        if self.has_started.is_set():
            return
        self.has_started.set()
        before = len(self._server.heartbeats())
        ends_at = time.monotonic() + TIMEOUT_SECONDS / 2
        while time.monotonic() < ends_at:
            self._pause()
            self.num_beats = len(self._server.heartbeats()) - before
            if self.num_beats >= MIN_HEARTBEATS and self.may_end.is_set():
                break
        self.is_over.set()

    def check(self) -> None:
        """Assert that heartbeats arrived while the code blocked."""
        self.may_end.set()
        assert self.is_over.wait(TIMEOUT_SECONDS)
        assert self.num_beats >= MIN_HEARTBEATS


def wait() -> None:
    """Block in a wait."""
    time.sleep(0.01)


def spin() -> None:
    """Block in a busy loop."""
    for _ in range(100):
        sum(range(1000))


@pytest.fixture
def beating(server: StubServer, connect: Connect) -> ServiceClient:
    return connect(server, heartbeat_seconds=INTERVAL)


# --- nothing delays heartbeats ----------------------------------------------------------------


@pytest.mark.parametrize("pause", [wait, spin])
def test_custom_loss_does_not_delay_heartbeats(
    server: StubServer, beating: ServiceClient, pause: Callable[[], None]
) -> None:
    pytest.importorskip("torch")
    client = beating.create_lora_training_client(BASE_MODEL)
    blocker = Blocker(server, pause)
    blocker.may_end.set()

    def loss(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        blocker()
        return -sum(row.sum() for row in logprobs), {}

    client.forward_backward_custom([datum()], loss).result(TIMEOUT_SECONDS)
    blocker.check()


def test_callback_does_not_delay_heartbeats(server: StubServer, beating: ServiceClient) -> None:
    """Callbacks of a future run on the request thread; heartbeats have another one."""
    sampler = beating.create_sampling_client(base_model=BASE_MODEL)
    blocker = Blocker(server, wait)
    blocker.may_end.set()
    future = sampler.sample(PROMPT, 1, SHORT)
    future.add_done_callback(blocker)
    future.result(TIMEOUT_SECONDS)
    blocker.check()


def test_event_hook_delays_neither_heartbeats_nor_work(
    server: StubServer, connect: Connect
) -> None:
    blocker = Blocker(server, wait)
    service = connect(server, heartbeat_seconds=INTERVAL, event_hook=blocker)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    assert blocker.has_started.wait(TIMEOUT_SECONDS)
    # It ends only after this, or after a long timeout.
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert not blocker.is_over.is_set()
    blocker.check()


def test_raising_event_hook_does_not_affect_work(server: StubServer, connect: Connect) -> None:
    def hook(event: Any) -> None:
        raise RuntimeError("hook")

    service = connect(server, heartbeat_seconds=INTERVAL, event_hook=hook)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    server.wait_for("session_heartbeat", 2)


def test_large_results_do_not_delay_heartbeats(server: StubServer, beating: ServiceClient) -> None:
    """60 MB in 60,000 arrays, encoded beforehand so that the server only sends it."""
    client = beating.create_lora_training_client(BASE_MODEL)
    row = {"logprobs": TensorData.from_numpy(np.zeros(250, dtype=np.float32))}
    huge = encode_forward_backward_output(ForwardBackwardOutput("ArrayRecord", [row] * 60_000, {}))
    proto = {"content-type": "application/x-protobuf"}
    server.inject("retrieve_future", Fault(status=200, body=huge, headers=proto))
    started = time.monotonic()
    output = client.forward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    ended = time.monotonic()
    assert len(output.loss_fn_outputs) == 60_000
    beats = [beat for beat in server.heartbeats() if started < beat < ended]
    assert len(beats) >= MIN_HEARTBEATS
    assert beating.metrics().counters.get("heartbeats_failed", 0) == 0


def test_hung_session_does_not_delay_another(serve: Serve, connect: Connect) -> None:
    hung, fine = serve(), serve()
    hung.inject("session_heartbeat", Fault(delay_seconds=60.0), times=None)
    for server in (hung, fine):
        connect(server, heartbeat_seconds=INTERVAL).create_lora_training_client(BASE_MODEL)
    hung.wait_for("session_heartbeat")
    fine.wait_for("session_heartbeat", len(fine.heartbeats()) + 5)


def test_idle_client_renews_token_for_heartbeats(serve: Serve, connect: Connect) -> None:
    """A token that expires while the client is idle must not end the session."""
    server = serve(api_keys={KEY}, client_config={"pjwt_auth_enabled": True}, token_seconds=2.0)
    service = connect(server, heartbeat_seconds=INTERVAL)
    service.create_lora_training_client(BASE_MODEL)
    time.sleep(2.2)
    expired_at = time.monotonic()
    eventually(lambda: sum(beat > expired_at for beat in server.heartbeats()) >= 3)
    assert len(server.calls("auth_token")) > 1


# --- failures ---------------------------------------------------------------------------------


def test_410_stops_heartbeats(
    server: StubServer, beating: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    beating.create_lora_training_client(BASE_MODEL)
    server.wait_for("session_heartbeat", 2)
    server.inject("session_heartbeat", Fault(status=410), times=None)
    eventually(lambda: beating.metrics().counters.get("heartbeats_failed", 0) == 1)
    num_beats = len(server.calls("session_heartbeat"))
    time.sleep(5 * INTERVAL)
    assert len(server.calls("session_heartbeat")) == num_beats
    assert caplog.records == []


@pytest.mark.parametrize(
    "fault", [Fault(status=500), Fault(status=404), Fault(status=401), Fault(drop=True)]
)
def test_other_failures_do_not_stop_heartbeats(
    server: StubServer, beating: ServiceClient, fault: Fault
) -> None:
    server.inject("session_heartbeat", fault, times=3)
    beating.create_lora_training_client(BASE_MODEL)
    server.wait_for("session_heartbeat", 5)
    eventually(lambda: beating.metrics().counters["heartbeats"] >= 1)
    assert beating.metrics().counters["heartbeats_failed"] == 3


def test_heartbeats_continue_after_server_restart(
    server: StubServer, beating: ServiceClient
) -> None:
    beating.create_lora_training_client(BASE_MODEL)
    server.wait_for("session_heartbeat")
    server.restart()
    server.wait_for("session_heartbeat", len(server.calls("session_heartbeat")) + 3)


# --- shutdown ---------------------------------------------------------------------------------


def test_no_heartbeat_after_close(server: StubServer, beating: ServiceClient) -> None:
    """Not even one that the server would reject."""
    beating.create_lora_training_client(BASE_MODEL)
    server.wait_for("session_heartbeat", 2)
    beating.close().result(TIMEOUT_SECONDS)
    num_beats = len(server.calls("session_heartbeat"))
    time.sleep(5 * INTERVAL)
    assert len(server.calls("session_heartbeat")) == num_beats
    finished_at = server.calls("finish_session")[0].arrived_at
    assert max(server.heartbeats()) < finished_at + INTERVAL


def test_session_without_heartbeat_is_finished(server: StubServer, connect: Connect) -> None:
    with connect(server, heartbeat_seconds=30.0) as service:
        service.create_lora_training_client(BASE_MODEL)
    assert server.heartbeats() == []
    assert list(server.finish_reasons.values()) == ["success"]


@pytest.mark.parametrize("options", [{}, {"telemetry": True}, {"event_hook": Events()}])
def test_unreferenced_client_stops_heartbeats(server: StubServer, options: dict[str, Any]) -> None:
    """Otherwise a server would keep the weights of a dead client."""
    service = ServiceClient(base_url=server.url, api_key=KEY, heartbeat_seconds=INTERVAL, **options)
    client = service.create_lora_training_client(BASE_MODEL)
    client.forward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    service.create_sampling_client(base_model=BASE_MODEL).sample(PROMPT, 1, SHORT).result(
        TIMEOUT_SECONDS
    )
    server.wait_for("session_heartbeat", 2)
    if isinstance(hook := options.get("event_hook"), Events):
        hook.wait_for(1, Timing, operation="sample")
    del service, client

    def is_quiet() -> bool:
        gc.collect()
        num_beats = len(server.calls("session_heartbeat"))
        time.sleep(5 * INTERVAL)
        return len(server.calls("session_heartbeat")) == num_beats

    eventually(is_quiet)


def test_client_in_use_continues_heartbeats(server: StubServer, connect: Connect) -> None:
    """The training client alone keeps the session alive."""

    def train() -> Any:
        service = ServiceClient(base_url=server.url, api_key=KEY, heartbeat_seconds=INTERVAL)
        return service.create_lora_training_client(BASE_MODEL)

    client = train()
    gc.collect()
    server.wait_for("session_heartbeat", len(server.calls("session_heartbeat")) + 3)
    client.holder.close("success").result(TIMEOUT_SECONDS)
