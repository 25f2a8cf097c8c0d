"""Shutdown: close() resolves everything, and a process can always exit."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    datum,
)
from tinkex import (
    AdamParams,
    AuthenticationError,
    ClientClosed,
    RestClient,
    SamplingParams,
    ServiceClient,
    Timing,
)
from tinkex.client.retry import NO_RETRY
from tinkex.testing import Fault, StubServer

ADAM = AdamParams(learning_rate=0.1)
LONG = 300.0


# --- close() ----------------------------------------------------------------------------------


def test_close_resolves_all_pending_futures(serve: Serve, connect: Connect) -> None:
    """Queued, sending and awaited operations are all resolved."""
    server = serve()
    service = connect(server)
    client = service.create_lora_training_client(BASE_MODEL)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    server.inject("retrieve_future", Fault(delay_seconds=LONG), times=None)
    server.inject("optim_step", Fault(delay_seconds=LONG), times=None)
    futures: list[Any] = [sampler.sample(PROMPT, 1, SHORT) for _ in range(5)]
    futures.append(client.forward_backward([datum()] * 3, "cross_entropy"))
    futures += [client.optim_step(ADAM) for _ in range(5)]
    futures.append(client.save_weights_for_sampler("never"))
    futures.append(sampler.compute_logprobs(PROMPT))
    server.wait_for("optim_step")
    server.wait_for("retrieve_future", 6)
    service.close().result(TIMEOUT_SECONDS)
    for future in futures:
        assert isinstance(future.exception(TIMEOUT_SECONDS), ClientClosed)
    assert list(server.finish_reasons.values()) == ["success"]
    # Queued operations were never sent.
    assert len(server.calls("optim_step")) == 1
    assert server.calls("save_weights_for_sampler") == []


def test_close_ends_blocking_call_of_another_thread(serve: Serve, connect: Connect) -> None:
    server = serve(work_seconds=LONG)
    service = connect(server)
    caught: list[BaseException] = []

    def create() -> None:
        try:
            service.create_lora_training_client(BASE_MODEL)
        except ClientClosed as error:
            caught.append(error)

    thread = threading.Thread(target=create, daemon=True)
    thread.start()
    server.wait_for("retrieve_future")
    service.close().result(TIMEOUT_SECONDS)
    thread.join(TIMEOUT_SECONDS)
    assert len(caught) == 1


def test_closed_client_raises(service: ServiceClient) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    rest = service.rest_client()
    service.close().result(TIMEOUT_SECONDS)
    calls: list[Callable[[], Any]] = [
        lambda: client.forward_backward([datum()], "cross_entropy"),
        lambda: client.optim_step(ADAM),
        lambda: client.save_state("a"),
        client.save_weights_and_get_sampling_client,
        client.get_info,
        lambda: sampler.sample(PROMPT, 1, SHORT),
        lambda: sampler.compute_logprobs(PROMPT),
        lambda: service.create_lora_training_client(BASE_MODEL),
        lambda: service.create_sampling_client(base_model=BASE_MODEL),
        service.get_server_capabilities,
        lambda: rest.list_sessions(),
        service.__enter__,
    ]
    for call in calls:
        with pytest.raises(ClientClosed):
            call()


def test_close_is_idempotent(server: StubServer, service: ServiceClient) -> None:
    service.create_lora_training_client(BASE_MODEL)
    service.close().result(TIMEOUT_SECONDS)
    service.close("errored").result(TIMEOUT_SECONDS)
    assert list(server.finish_reasons.values()) == ["success"]
    assert len(server.calls("finish_session")) == 1


def test_unused_client_closes_without_requests(server: StubServer) -> None:
    with ServiceClient(base_url=server.url, api_key=KEY):
        pass
    assert server.calls() == []


def test_close_after_failed_start_does_not_raise(serve: Serve, connect: Connect) -> None:
    """The error was raised when it happened; leaving the block must not raise it again."""
    server = serve(api_keys={"tml-other"})
    with connect(server) as service, pytest.raises(AuthenticationError):
        service.create_lora_training_client(BASE_MODEL)
    assert server.calls("finish_session") == []


def test_unreachable_server_does_not_hide_callers_error(
    server: StubServer,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tinkex.client.session.FINISH_POLICY", NO_RETRY)
    with pytest.raises(LookupError, match="mine"), connect(server) as service:
        service.create_lora_training_client(BASE_MODEL)
        server.stop()
        raise LookupError("mine")
    assert "was not finished on the server" in caplog.text


def test_server_without_finish_endpoint_is_accepted(
    server: StubServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server.inject("finish_session", Fault(status=404))
    with connect(server) as service:
        service.create_lora_training_client(BASE_MODEL)
    assert caplog.records == []


def test_event_hook_receives_operations_cancelled_by_close(serve: Serve, connect: Connect) -> None:
    server = serve(work_seconds=LONG)
    events = Events()
    service = connect(server, event_hook=events)
    future = service.create_sampling_client(base_model=BASE_MODEL).sample(PROMPT, 1, SHORT)
    server.wait_for("retrieve_future")
    service.close().result(TIMEOUT_SECONDS)
    assert isinstance(future.exception(TIMEOUT_SECONDS), ClientClosed)
    (timing,) = events.wait_for(1, Timing, operation="sample")
    assert not timing.ok


def test_rest_client_needs_no_close(server: StubServer) -> None:
    rest = RestClient(base_url=server.url, api_key=KEY)
    rest.list_sessions().result(TIMEOUT_SECONDS)
    assert server.calls("create_session") == []


# --- processes --------------------------------------------------------------------------------

PREFACE = f"""
import os, signal, sys, threading, time
from tinkex import AdamParams, ClientClosed, ConfigError, ModelInput, SamplingParams, ServiceClient

# Processes of a background job are born deaf to it.
signal.signal(signal.SIGINT, signal.default_int_handler)
URL = sys.argv[1]
PROMPT, SHORT = ModelInput.from_ints([1]), SamplingParams(max_tokens=1)

def connect(**options):
    return ServiceClient(base_url=URL, api_key={KEY!r}, **options)

def sampler(service):
    return service.create_sampling_client(base_model={BASE_MODEL!r})

def sample(client):
    return client.sample(PROMPT, 1, SHORT).result(60)
"""


def run_script(server: StubServer, body: str) -> subprocess.CompletedProcess[str]:
    """Run a script against the server; fails if the script does not end."""
    script = PREFACE + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, server.url],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("options", ["", "event_hook=lambda event: None", "telemetry=True"])
def test_script_without_close_exits_cleanly(server: StubServer, options: str) -> None:
    done = run_script(
        server,
        f"""
        client = connect({options})
        sample(sampler(client))
        print("sampled")
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "sampled\n", "")
    assert list(server.finish_reasons.values()) == ["success"]


def test_exit_with_pending_work_is_clean(server: StubServer) -> None:
    """HTTP library threads that still deliver responses must not abort the process."""
    body = """
        client = sampler(connect())
        futures = [client.sample(PROMPT, 1, SHORT) for _ in range(200)]
        futures[0].result(60)
        """
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: run_script(server, body), range(4)))
    assert [(each.returncode, each.stderr) for each in done] == [(0, "")] * 4
    assert list(server.finish_reasons.values()) == ["success"] * 4


def test_ctrl_c_while_waiting_exits_immediately(server: StubServer) -> None:
    server.inject("retrieve_future", Fault(delay_seconds=LONG), times=None)
    started = time.monotonic()
    done = run_script(
        server,
        """
        with connect() as service:
            future = sampler(service).sample(PROMPT, 1, SHORT)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            future.result()
        """,
    )
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "Exception ignored" not in done.stderr
    assert list(server.finish_reasons.values()) == ["interrupted"]
    assert time.monotonic() - started < LONG


def test_ctrl_c_without_context_manager_exits_immediately(server: StubServer) -> None:
    server.inject("retrieve_future", Fault(delay_seconds=LONG), times=None)
    done = run_script(
        server,
        """
        client = sampler(connect())
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        client.sample(PROMPT, 1, SHORT).result()
        """,
    )
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert len(server.finish_reasons) == 1


def test_dead_server_does_not_delay_exit(server: StubServer) -> None:
    """At exit the session cannot be finished; the attempt has a short time limit."""
    script = PREFACE + "client = sampler(connect()); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        server.stop()
        _, errors = process.communicate("\n", timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_no_thread_keeps_process_alive(server: StubServer) -> None:
    done = run_script(
        server,
        """
        service = connect(event_hook=lambda event: None)
        sample(sampler(service))
        service.close().result(60)
        def alive():
            return [t.name for t in threading.enumerate() if t.is_alive() and not t.daemon]
        ends_at = time.monotonic() + 30
        while len(alive()) > 1 and time.monotonic() < ends_at:
            time.sleep(0.01)
        print(alive())
        """,
    )
    assert done.stdout == "['MainThread']\n", done.stderr


def test_forked_child_raises_or_works(server: StubServer) -> None:
    """The HTTP library's threads do not survive a fork; a child must not hang."""
    done = run_script(
        server,
        """
        service = connect()
        client = sampler(service)
        sample(client)
        child = os.fork()
        if child == 0:
            for attempt in (lambda: sample(client), lambda: sample(sampler(connect()))):
                try:
                    attempt()
                    print("works", flush=True)
                except ConfigError as error:
                    print("told", bool(error.hint), flush=True)
            sys.exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
        print(len(sample(client).sequences), flush=True)
        os._exit(0)
        """,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert set(lines[:2]) <= {"works", "told True"}
    assert lines[2:] == ["0", "1"]
    # The child exited normally and did not finish its parent's session.
    assert server.finish_reasons == {}


def test_child_forked_before_first_call_works(server: StubServer) -> None:
    done = run_script(
        server,
        """
        service = connect()
        child = os.fork()
        client = sampler(service)
        os.write(1, b"%d\\n" % len(sample(client).sequences))
        service.close().result(60)
        if child:
            os.waitpid(child, 0)
        """,
    )
    assert done.stdout == "1\n1\n", done.stderr
    assert list(server.finish_reasons.values()) == ["success", "success"]


def test_sampling_continues_while_another_thread_exits(serve: Serve, connect: Connect) -> None:
    """Futures are not bound to the thread that created them."""
    service = connect(serve(work_seconds=0.1))
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    made: list[Any] = []
    thread = threading.Thread(
        target=lambda: made.append(sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1)))
    )
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    assert made[0].result(TIMEOUT_SECONDS).sequences
