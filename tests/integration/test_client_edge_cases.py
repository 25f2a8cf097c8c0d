"""Client edge cases: concurrent and interrupted operations."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import traceback
import weakref
from pathlib import Path

import pytest

import tinkex
from tests.integration.conftest import (
    BASE_MODEL,
    HELLO,
    KEY,
    PROMPT,
    SHORT,
    TIMEOUT_SECONDS,
    Connect,
    Serve,
    datum,
    eventually,
)
from tinkex import AdamParams, Datum, ServiceClient
from tinkex.client.retry import RetryConfig
from tinkex.testing import Fault, StubServer

ADAM = AdamParams(learning_rate=1e-3)
OTHER = list(b"world world world")


def test_batch_can_be_reused_after_call(service: ServiceClient, server: StubServer) -> None:
    torch = pytest.importorskip("torch")
    client = service.create_lora_training_client(BASE_MODEL)
    batch = [datum(HELLO)]
    seen: list[Datum] = []

    def loss(data: list[Datum], logprobs: list[object]) -> tuple[object, dict[str, float]]:
        seen.extend(data)
        return torch.stack([each.sum() for each in logprobs]).sum(), {}  # type: ignore[attr-defined]

    future = client.forward_backward_custom(batch, loss)
    batch[:] = [datum(OTHER)]
    future.result(TIMEOUT_SECONDS)
    sent = [call.message.forward_backward_input.data for call in server.calls("forward_backward")]
    inputs = [chunk[0].model_input.to_ints() for chunk in sent]
    assert inputs == [HELLO[:-1], HELLO[:-1]]
    assert [each.model_input.to_ints() for each in seen] == [HELLO[:-1]]


def test_any_iterable_of_datums_is_accepted(service: ServiceClient) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    output = client.forward_backward(iter([datum(), datum()]), "cross_entropy")  # type: ignore[arg-type]
    assert len(output.result(TIMEOUT_SECONDS).loss_fn_outputs) == 2


def test_polls_do_not_delay_heartbeats_or_training(serve: Serve, connect: Connect) -> None:
    server = serve(work_seconds=2.0)
    service = connect(server, max_connections=4, heartbeat_seconds=0.05)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    samples = [sampler.sample(PROMPT, 1, SHORT) for _ in range(12)]
    server.wait_for("retrieve_future", 4)
    beats = len(server.calls("session_heartbeat"))
    server.wait_for("session_heartbeat", beats + 3, timeout=TIMEOUT_SECONDS)
    assert not all(sample.done() for sample in samples)
    assert all(sample.result(TIMEOUT_SECONDS).sequences for sample in samples)


def test_failed_fetch_of_announced_result_is_retried(serve: Serve, connect: Connect) -> None:
    server = serve(client_config={"sample_use_retrieve_futures": True})
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)
    server.inject("retrieve_future", Fault(status=500, body={"detail": "hiccup"}), times=4)
    config = RetryConfig(retry_delay_base=0.01)
    again = sampler.holder
    client = tinkex.SamplingClient.create(again, base_model=BASE_MODEL, retry_config=config)
    assert client.result(TIMEOUT_SECONDS).sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS).sequences


def test_outage_does_not_use_up_retries(server: StubServer, connect: Connect) -> None:
    client = connect(server, max_retries=1).create_lora_training_client(BASE_MODEL)
    server.inject("optim_step", Fault(drop=True), times=3)
    server.inject("optim_step", Fault(status=500, body={"detail": "warming up"}))
    assert client.optim_step(ADAM).result(TIMEOUT_SECONDS).metrics is not None
    assert len(server.calls("optim_step")) == 5


def test_session_created_during_close_is_finished(server: StubServer) -> None:
    server.inject("create_session", Fault(delay_seconds=1.5))
    service = ServiceClient(base_url=server.url, api_key=KEY, heartbeat_seconds=0.05)
    making = threading.Thread(target=_swallow, args=(service,))
    making.start()
    server.wait_for("create_session")
    service.close("success").result(TIMEOUT_SECONDS)
    making.join(TIMEOUT_SECONDS)
    eventually(lambda: len(server.finish_reasons) == 1)
    assert server.heartbeats() == []


def _swallow(service: ServiceClient) -> None:
    with pytest.raises(tinkex.ClientClosed):
        service.create_lora_training_client(BASE_MODEL)


@pytest.mark.parametrize("ending", ["service.close('success')", "1 / 0", ""])
def test_script_end_finishes_session(server: StubServer, ending: str) -> None:
    script = (
        "import sys, tinkex\n"
        f"service = tinkex.ServiceClient(base_url=sys.argv[1], api_key={KEY!r})\n"
        f"service.create_lora_training_client({BASE_MODEL!r})\n"
        f"{ending}\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, server.url], capture_output=True, timeout=60, check=False
    )
    expected = "errored" if "/" in ending else "success"
    assert list(server.finish_reasons.values()) == [expected]


def test_token_with_line_break_is_rejected_without_showing_it(service: ServiceClient) -> None:
    path = "tinker://run:train:0/weights/x"
    secret = "-".join(["foreign", "secret"])
    with pytest.raises(tinkex.InvalidInput, match="HTTP does not allow") as caught:
        service.copy_weights(path, weights_access_token=f"{secret}\n").result(TIMEOUT_SECONDS)
    shown = "".join(traceback.format_exception(caught.value))
    assert secret not in shown


def test_many_cancels_are_all_sent(serve: Serve, connect: Connect) -> None:
    flags = {"sample_cancel_enabled": True}
    server = serve(work_seconds=5.0, dynamic_config=flags)
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)
    samples = [sampler.sample(PROMPT, 1, SHORT) for _ in range(10)]
    server.wait_for("retrieve_future", 10)
    cancelled = [sample.cancel() for sample in samples]
    assert all(cancelled)
    assert len(server.wait_for("cancel_future", 10, timeout=TIMEOUT_SECONDS)) == 10


def test_billing_issue_pauses_submission(
    server: StubServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(server, billing_pause_seconds=0.3).create_lora_training_client(BASE_MODEL)
    server.inject("optim_step", Fault(status=402, body={"detail": "no funds"}))
    assert client.optim_step(ADAM).result(TIMEOUT_SECONDS).metrics is not None
    assert "Paused by a billing issue" in caplog.text
    server.inject("optim_step", Fault(status=402, body={"detail": "no funds"}), times=None)
    with pytest.raises(tinkex.BillingError, match="no funds"):
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)


def test_finished_future_releases_references(server: StubServer) -> None:
    service = ServiceClient(base_url=server.url, api_key=KEY)
    client = service.create_lora_training_client(BASE_MODEL)
    batch = [datum()]
    first = weakref.ref(batch[0].loss_fn_inputs["weights"].array)
    future = client.forward_backward(batch, "cross_entropy")
    assert future.result(TIMEOUT_SECONDS).metrics
    holder = weakref.ref(client.holder)
    service.close("success").result(TIMEOUT_SECONDS)
    del service, client, batch

    def is_gone() -> bool:
        gc.collect()
        return first() is None and holder() is None

    eventually(is_gone)
    assert future.done()


def test_credential_command_output_is_cached(
    server: StubServer, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "runs"
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo run >> {log}; echo tml-printed")
    service = connect(server, api_key=None)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    for _ in range(5):
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert log.read_text().count("run") == 1
    assert {call.api_key for call in server.calls("asample")} == {"tml-printed"}


@pytest.mark.parametrize("verb", ["delete", "publish"])
def test_conflict_after_lost_response_counts_as_success(
    server: StubServer, service: ServiceClient, verb: str
) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    path = client.save_state("kept").result(TIMEOUT_SECONDS).path
    server.inject(f"{verb}_checkpoint", Fault(drop_after=True))
    method = getattr(service.rest_client(), f"{verb}_checkpoint_from_tinker_path")
    assert method(path).result(TIMEOUT_SECONDS) is None
    # Without a lost response the same reply is an error.
    with pytest.raises((tinkex.NotFoundError, tinkex.ConflictError)):
        method(path).result(TIMEOUT_SECONDS)


def test_stuck_samples_are_cancelled(serve: Serve, connect: Connect) -> None:
    server = serve(work_seconds=30.0, long_poll_seconds=0.2)
    service = connect(server)
    config = RetryConfig(progress_timeout=0.5)
    sampler = service.create_sampling_client(base_model=BASE_MODEL, retry_config=config)
    with pytest.raises(tinkex.ResultTimeoutError, match=r"made progress for 0\.5 s"):
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)


def test_save_in_signal_handler_during_encoding(service: ServiceClient) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    saved: list[tinkex.APIFuture[object]] = []

    class Interrupting(list[Datum]):
        """Acts like a signal handler: saves while the batch is being encoded."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            if not saved:
                saved.append(client.save_state("now"))  # type: ignore[arg-type]
            return super().__iter__()

    output = client.forward_backward(Interrupting([datum()]), "cross_entropy")
    assert output.result(TIMEOUT_SECONDS).metrics
    assert saved[0].result(TIMEOUT_SECONDS)


def test_extra_headers_are_sent_with_downloads(
    server: StubServer, connect: Connect, tmp_path: Path
) -> None:
    service = connect(server, headers={"x-proxy-auth": "pass"})
    client = service.create_lora_training_client(BASE_MODEL)
    path = client.save_weights_external("out").result(TIMEOUT_SECONDS).path
    service.rest_client().download_checkpoint(path, tmp_path / "out").result(TIMEOUT_SECONDS)
    downloads = server.calls("download")
    assert downloads
    assert {call.headers.get("x-proxy-auth") for call in downloads} == {"pass"}


def test_blocking_in_callback_raises(serve: Serve, connect: Connect) -> None:
    client = connect(serve(work_seconds=1.0)).create_lora_training_client(BASE_MODEL)
    caught: list[BaseException] = []
    done = threading.Event()

    def callback(_: object) -> None:
        try:
            client.get_info().result()
        except RuntimeError as error:
            caught.append(error)
        done.set()

    client.forward([datum()], "cross_entropy").add_done_callback(callback)
    assert done.wait(TIMEOUT_SECONDS)
    assert [type(error).__name__ for error in caught] == ["WrongThread"]


def test_optimizer_is_sent_only_if_set(server: StubServer, service: ServiceClient) -> None:
    """Servers before 0.36 reject the field; without it, all use AdamW."""
    service.create_lora_training_client(BASE_MODEL)
    service.create_lora_training_client(BASE_MODEL, optimizer=tinkex.DimuonOptimizerConfig())
    sent = [call.message.get("optimizer_config") for call in server.calls("create_model")]
    assert sent == [None, {"type": "dimuon", "version": 1}]
