"""The stub server over real HTTP, spoken to with the standard library."""

from __future__ import annotations

import http.client
import io
import json
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from tests.integration.conftest import TIMEOUT_SECONDS, eventually
from tinkex import types
from tinkex.testing import Fault, StubServer
from tinkex.types.base import decode_hook
from tinkex.wire.codec import compress_zstd
from tinkex.wire.endpoints import ENDPOINTS, PREFIX
from tinkex.wire.proto import (
    decode_forward_backward_output,
    decode_sample_response,
    encode_forward_backward_request,
)

BASE = "tinkex/bigram"
JSON, PROTO = "application/json", "application/x-protobuf"


class Reply:
    """An answer, read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.content = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.content)


class Wire:
    """One connection to a server, and a session with a model on it."""

    def __init__(self, server: StubServer, key: str = "tml-a") -> None:
        self.connection = http.client.HTTPConnection(
            urlsplit(server.url).netloc, timeout=TIMEOUT_SECONDS
        )
        self.key = key

    def close(self) -> None:
        self.connection.close()

    def call(self, name: str, body: Any = None, **options: Any) -> Reply:
        """Call an endpoint of the table; ids, query and headers are options."""
        endpoint = ENDPOINTS[name]
        path = endpoint.url_path(**options.get("ids", {})) + options.get("query", "")
        return self.request(endpoint.method, path, body, **options.get("headers", {}))

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"X-API-Key": self.key, "Accept": JSON, "Content-Type": JSON}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, content, sent)
        return Reply(self.connection.getresponse())

    def ok(self, name: str, body: Any = None, **options: Any) -> Any:
        reply = self.call(name, body, **options)
        assert reply.status == 200, (name, reply.status, reply.content)
        return reply.json

    def session(self, **fields: Any) -> str:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "1", **fields}
        session_id: str = self.ok("create_session", body)["session_id"]
        return session_id

    def model(self, session_id: str | None = None) -> str:
        session_id = session_id or self.session()
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
        body |= {"lora_config": {"rank": 4}}
        model_id: str = self.result(self.ok("create_model", body))["model_id"]
        return model_id

    def sampler(self, session_id: str | None = None) -> str:
        body = {"session_id": session_id or self.session(), "sampling_session_seq_id": 0}
        sampler_id: str = self.ok("create_sampling_session", {**body, "base_model": BASE})[
            "sampling_session_id"
        ]
        return sampler_id

    def sample(self, sampler_id: str, seq_id: int = 0, **asked: Any) -> Any:
        body = {
            "sampling_session_id": sampler_id,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 4, "seed": 1},
            **asked,
        }
        return self.ok("asample", body)

    def step(self, model_id: str, seq_id: int) -> Any:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.1}}
        return self.ok("optim_step", body)

    def train(self, model_id: str, seq_id: int, loss_fn: str = "cross_entropy") -> Any:
        body = encode_forward_backward_request(training_request(model_id, seq_id, loss_fn), False)
        return self.ok("forward_backward", body, headers={"Content_Type": PROTO})

    def result(self, promise: Any, accept: str = JSON) -> Any:
        reply = self.retrieve(promise, accept)
        assert reply.status == 200, (reply.status, reply.content)
        return reply.json if reply.headers["content-type"] == JSON else reply.content

    def retrieve(self, promise: Any, accept: str = JSON, is_size_enough: bool = False) -> Reply:
        body = {"request_id": promise["request_id"], "allow_metadata_only": is_size_enough}
        return self.call("retrieve_future", body, headers={"Accept": accept})


def training_request(
    model_id: str, seq_id: int, loss_fn: str = "cross_entropy", num_tokens: int = 2
) -> types.ForwardBackwardRequest:
    tokens = [index % 200 for index in range(num_tokens)]
    datum = types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": tokens})  # type: ignore[dict-item]
    work = types.ForwardBackwardInput([datum], loss_fn)  # type: ignore[arg-type]
    return types.ForwardBackwardRequest(work, model_id, seq_id)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer(gap_seconds=0.2) as running:
        yield running


@pytest.fixture
def wire(server: StubServer) -> Iterator[Wire]:
    with closing(Wire(server)) as connected:
        yield connected


# --- life ----------------------------------------------------------------------------------
def test_stop_leaves_no_threads() -> None:
    before = threading.enumerate()
    server = StubServer()
    with pytest.raises(RuntimeError, match="has not been started"):
        _ = server.url
    with server, closing(Wire(server)) as wire:
        assert wire.ok("health") == {"status": "ok"}
        with pytest.raises(RuntimeError, match="running already"):
            server.start()
    assert threading.enumerate() == before
    server.stop()


def test_stop_ends_a_waiting_poll() -> None:
    slow = StubServer(work_seconds=60.0, long_poll_seconds=60.0)
    with slow as server, closing(Wire(server)) as wire:
        promise = wire.sample(wire.sampler())
        stopping = threading.Thread(
            target=lambda: (server.wait_for("retrieve_future"), server.stop())
        )
        stopping.start()
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            wire.retrieve(promise)
        stopping.join()


def test_restart_keeps_port_state_and_pending_jobs() -> None:
    with StubServer(work_seconds=0.1) as server:
        url = server.url
        with closing(Wire(server)) as wire:
            model_id = wire.model()
            promise = wire.step(model_id, 1)
        server.stop()
        with pytest.raises(ConnectionRefusedError), closing(Wire(server)) as wire:
            wire.call("health")
        server.restart()
        assert server.url == url
        with closing(Wire(server)) as wire:
            assert wire.result(promise)["metrics"]["step"] == 1.0
            assert wire.result(wire.step(model_id, 2))["metrics"]["step"] == 2.0
        assert server.executed == [(model_id, 1, "optim_step"), (model_id, 2, "optim_step")]


def test_calls_raises_without_recording() -> None:
    with StubServer(record=False) as server, closing(Wire(server)) as wire:
        wire.ok("health")
        server.inject("health", Fault(status=503))
        assert wire.call("health").status == 503
        with pytest.raises(RuntimeError, match="record=False"):
            server.calls()


def test_module_serves_in_its_own_process() -> None:
    command = [sys.executable, "-m", "tinkex.testing", "--no-record", "--api-key", "tml-a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        netloc = urlsplit(child.stdout.readline().strip()).netloc
        with closing(http.client.HTTPConnection(netloc, timeout=TIMEOUT_SECONDS)) as connection:
            connection.request("GET", "/api/v1/get_server_capabilities")
            assert Reply(connection.getresponse()).status == 401
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=TIMEOUT_SECONDS) == 0
        assert child.stdout.read() == ""


# --- answers fit the table -----------------------------------------------------------------
def test_immediate_replies_match_the_endpoint_table(server: StubServer, wire: Wire) -> None:
    session_id = wire.session(display_name="My run")
    model_id, sampler_id = wire.model(session_id), wire.sampler(session_id)
    save = {"model_id": model_id, "path": "one", "seq_id": 1}
    path = wire.result(wire.ok("save_weights", save))["path"]
    exported = wire.result(wire.ok("save_weights_external", {**save, "seq_id": 2}))["path"]
    wire.ok("export_session_trace", ids={"session_id": session_id})
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    start, end = today - timedelta(days=1), today + timedelta(days=1)
    day = f"?starting_on={start:%Y-%m-%dT%H:%M:%SZ}&ending_before={end:%Y-%m-%dT%H:%M:%SZ}"
    run, one = {"training_run_id": model_id}, {"checkpoint_id": "weights/one"}
    external = {"checkpoint_id": exported.split("/", 3)[3]}
    answers: dict[str, tuple[Any, dict[str, Any]]] = {
        "health": (None, {}),
        "get_server_capabilities": (None, {}),
        "client_config": ({"sdk_version": "1"}, {}),
        "client_dynamic_config": ({"sdk_version": "1"}, {}),
        "auth_token": ({}, {}),
        "get_api_key": (None, {}),
        "session_heartbeat": ({"session_id": session_id}, {}),
        "telemetry": (
            {
                "events": [],
                "platform": "Linux",
                "sdk_version": "1",
                "session_id": session_id,
                "process_uuid": "u",
            },
            {},
        ),
        "get_info": ({"model_id": model_id}, {}),
        "join_sampling_session": ({"sampling_session_id": sampler_id}, {}),
        "get_sampler": (None, {"ids": {"sampler_id": sampler_id}}),
        "list_training_runs": (None, {}),
        "get_training_run": (None, {"ids": run}),
        "list_checkpoints": (None, {"ids": run}),
        "list_model_checkpoints": (None, {"ids": run}),
        "list_user_checkpoints": (None, {}),
        "set_checkpoint_ttl": ({"ttl_seconds": 3600}, {"ids": run | one}),
        "publish_checkpoint": (None, {"ids": run | one}),
        "unpublish_checkpoint": (None, {"ids": run | one}),
        "external_weights_urls": (None, {"ids": run | external}),
        "weights_info": ({"tinker_path": path}, {}),
        "copy_weights": ({"source_path": path}, {}),
        "list_sessions": (None, {}),
        "get_session": (None, {"ids": {"session_id": session_id}}),
        "assign_session_project": ({"project_id": "p"}, {"ids": {"session_id": session_id}}),
        "export_session_trace": (None, {"ids": {"session_id": session_id}}),
        "search_checkpoints": ({"checkpoint_type": "training"}, {}),
        "search_sessions": ({"display_name": "RUN my"}, {}),
        "get_audit_log": (None, {}),
        "get_billing_usage": (None, {"query": day}),
        "get_current_checkpoint_storage_usage": (None, {}),
        "get_quotas": (None, {}),
        "delete_checkpoint": (None, {"ids": run | one}),
        "finish_session": ({"reason": {"type": "success"}}, {"ids": {"session_id": session_id}}),
    }
    for name, (body, options) in answers.items():
        content = wire.ok(name, body, **options)
        value = msgspec.convert(content, ENDPOINTS[name].reply, dec_hook=decode_hook)
        if name == "search_sessions":
            assert [found.session_id for found in value.sessions] == [session_id]
    assert server.finish_reasons[session_id] == "success"
    assert len(server.heartbeats(session_id)) == 1
    assert wire.call("session_heartbeat", {"session_id": session_id}).status == 410
    wire.ok("delete_api_key")


# --- promises ------------------------------------------------------------------------------
def test_operations_run_in_order_and_retries_get_the_same_future(
    server: StubServer, wire: Wire
) -> None:
    model_id = wire.model()
    late = wire.step(model_id, 3)
    second = wire.train(model_id, 2)
    assert wire.train(model_id, 2) == second
    first = wire.train(model_id, 1)
    assert wire.result(late)["metrics"]["step"] == 1.0
    assert wire.train(model_id, 1) == first
    kinds = [(seq_id, kind) for _, seq_id, kind in server.executed]
    assert kinds == [(1, "forward_backward"), (2, "forward_backward"), (3, "optim_step")]
    started = time.monotonic()
    wire.result(wire.step(model_id, 9))
    assert time.monotonic() - started > 0.15, "a gap is waited for, not for ever"


def test_save_load_and_step_run_in_order(wire: Wire) -> None:
    model_id = wire.model()
    path = f"tinker://{model_id}/weights/one"
    load = {"model_id": model_id, "path": path, "optimizer": True}
    wire.train(model_id, 1)
    stepped = {"model_id": model_id, "seq_id": 2, "adam_params": {}}
    assert wire.result(wire.ok("optim_step", stepped))["metrics"]["step"] == 1.0
    saved = wire.ok("save_weights", {"model_id": model_id, "path": "one", "seq_id": 3})
    assert wire.result(saved)["path"] == path
    assert wire.result(wire.ok("load_weights", {**load, "seq_id": 4}))["path"] == path
    missing = wire.call("load_weights", {**load, "path": f"{path}-two", "seq_id": 5})
    assert (missing.status, "one-two" in missing.json["error"]) == (404, True)
    again = wire.ok("save_weights", {"model_id": model_id, "path": "one", "seq_id": 5})
    assert "overwrite=True" in wire.result(again)["error"]
    bad = wire.call("save_weights", {"model_id": model_id, "path": "../x", "seq_id": 6})
    assert (bad.status, "'../x'" in bad.json["error"]) == (422, True)


def test_poll_waits_at_most_long_poll_seconds() -> None:
    slow = StubServer(work_seconds=1.0, long_poll_seconds=0.1)
    with slow as server, closing(Wire(server)) as wire:
        promise = wire.sample(wire.sampler())
        started = time.monotonic()
        reply = wire.retrieve(promise)
        assert (reply.status, reply.json["queue_state"]) == (408, "active")
        assert time.monotonic() - started >= 0.1
        while (reply := wire.retrieve(promise)).status == 408:
            pass
        assert reply.status == 200
        assert len(reply.json["sequences"][0]["tokens"]) == 4


def test_results_are_protobuf_on_request(wire: Wire) -> None:
    sampler_id = wire.sampler()
    promise = wire.sample(sampler_id, num_samples=2, prompt_logprobs=True)
    assert len(promise["sample_sequence_ids"]) == 2
    binary = decode_sample_response(wire.result(promise, PROTO))
    plain = wire.result(promise)
    tokens = [sequence.tokens for sequence in binary.sequences]
    assert tokens == [sequence["tokens"] for sequence in plain["sequences"]]
    assert binary.prompt_logprobs == plain["prompt_logprobs"]
    output = decode_forward_backward_output(wire.result(wire.train(wire.model(), 1), PROTO))
    assert set(output.metrics) == {"loss:sum", "tokens:sum", "entropy:mean"}


def test_large_result_is_announced_by_its_size(wire: Wire) -> None:
    model_id = wire.model()
    request = training_request(model_id, 1, num_tokens=30_000)
    headers = {"Content_Type": PROTO, "Content_Encoding": "zstd"}
    packed = compress_zstd(encode_forward_backward_request(request, False))
    promise = wire.ok("forward_backward", packed, headers=headers)
    announced = wire.retrieve(promise, PROTO, is_size_enough=True).json
    content = wire.retrieve(promise, PROTO).content
    assert announced["status"] == "complete_metadata"
    assert announced["response_payload_size"] == len(content) > 64 * 1024


def test_failed_job_has_a_category_and_unknown_future_is_404(wire: Wire) -> None:
    save = {"model_id": wire.model(), "path": "one"}
    wire.result(wire.ok("save_weights", {**save, "seq_id": 1}))
    reply = wire.retrieve(wire.ok("save_weights", {**save, "seq_id": 2}))
    assert reply.status == 200
    assert reply.json["category"] == "user"
    assert "overwrite=True" in reply.json["error"]
    assert wire.retrieve({"request_id": "req-12345"}).status == 404


def test_batched_poll_lists_each_completion_once() -> None:
    with StubServer(work_seconds=0.05) as server, closing(Wire(server)) as wire:
        sampler_id = wire.sampler()
        promises = [wire.sample(sampler_id, seq_id) for seq_id in (0, 1, 5_000_000_000)]
        target = {"type": "sampling_session", "sampling_session_id": sampler_id}
        seen, cursor = list[str](), 0
        while len(seen) < 2:
            reply = wire.ok("retrieve_futures", {"target": target, "prev_cursor": cursor})
            seen += [done["request_id"] for done in reply["completions"]]
            cursor = reply["cursor"]
        assert seen == [promise["request_id"] for promise in promises[:2]]
        clone = wire.ok("retrieve_futures", {"target": {**target, "cloned_sampler_id": 5}})
        [done] = clone["completions"]
        assert done["state"] == "finished"
        size = len(wire.retrieve(promises[2], PROTO).content)
        assert done["response_payload_uncompressed_size"] == size


def test_cancelled_sample_fails() -> None:
    with StubServer(work_seconds=60.0) as server, closing(Wire(server)) as wire:
        promise = wire.sample(wire.sampler())
        wire.ok("cancel_future", {"request_id": promise["request_id"]})
        assert "cancelled" in wire.result(promise)["error"]


def test_repeated_idempotency_key_opens_one_session(server: StubServer, wire: Wire) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "1"}
    headers = {"X_Idempotency_Key": "once"}
    first = wire.ok("create_session", body, headers=headers)
    assert wire.ok("create_session", body, headers=headers) == first
    assert list(server.sessions) == [first["session_id"]]


# --- faults --------------------------------------------------------------------------------
def test_status_fault_is_returned_the_given_number_of_times(server: StubServer, wire: Wire) -> None:
    fault = Fault(status=429, headers={"retry-after": "0.2"}, body={"detail": "slow down"})
    server.inject("health", fault, times=2)
    replies = [wire.call("health") for _ in range(3)]
    assert [reply.status for reply in replies] == [429, 429, 200]
    assert (replies[0].headers["retry-after"], replies[0].json) == ("0.2", {"detail": "slow down"})
    assert len(server.calls("health")) == 3


def test_dropped_request_is_not_executed_and_dropped_response_is(
    server: StubServer, wire: Wire
) -> None:
    model_id = wire.model()
    body = {"model_id": model_id, "seq_id": 1, "adam_params": {}}
    for fault, executed in ((Fault(drop=True), 0), (Fault(drop_after=True), 1)):
        server.inject("optim_step", fault)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            wire.call("optim_step", body)
        wire.close()
        eventually(lambda executed=executed: len(server.executed) == executed)
    assert wire.result(wire.ok("optim_step", body))["metrics"]["step"] == 1.0
    assert len(server.executed) == 1


def test_faults_delay_chunk_garble_and_cut_responses(server: StubServer, wire: Wire) -> None:
    server.inject("health", Fault(delay_seconds=0.1, headers={"x-note": "late"}))
    started = time.monotonic()
    assert wire.call("health").headers["x-note"] == "late"
    assert time.monotonic() - started >= 0.1
    server.inject("health", Fault(status=400, body={"detail": "no"}, chunked=True))
    chunked = wire.call("health")
    assert (chunked.headers["content-length"], chunked.json) == (None, {"detail": "no"})
    server.inject("health", Fault(garbage=b"\x00\x01 this is no HTTP\r\n\r\n"))
    with pytest.raises(http.client.BadStatusLine):
        wire.call("health")
    wire.close()
    server.inject("health", Fault(cut_after_bytes=5))
    with pytest.raises(http.client.IncompleteRead, match="5 bytes read, 10 more"):
        wire.call("health")


# --- tenants -------------------------------------------------------------------------------
def test_unknown_keys_are_rejected_and_tenants_are_isolated() -> None:
    with (
        StubServer(api_keys={"tml-a", "tml-b"}) as server,
        closing(Wire(server, "tml-a")) as mine,
        closing(Wire(server, "tml-b")) as theirs,
        closing(Wire(server, "tml-c")) as stranger,
    ):
        assert stranger.call("client_config", {"sdk_version": "1"}).status == 401
        assert "detail" in stranger.call("list_sessions").json
        assert stranger.ok("health") == {"status": "ok"}
        session_id = mine.session()
        model_id = mine.model(session_id)
        promise = mine.step(model_id, 1)
        path = mine.result(
            mine.ok("save_weights", {"model_id": model_id, "path": "p", "seq_id": 2})
        )
        assert theirs.call("session_heartbeat", {"session_id": session_id}).status == 404
        assert theirs.call("get_info", {"model_id": model_id}).status == 404
        assert theirs.retrieve(promise).status == 404
        asked = {"tinker_path": path["path"]}
        assert theirs.call("weights_info", asked).status == 404
        ids = {"training_run_id": model_id, "checkpoint_id": "weights/p"}
        mine.ok("publish_checkpoint", ids=ids)
        assert mine.call("publish_checkpoint", ids=ids).status == 409
        assert theirs.ok("weights_info", asked)["base_model"] == BASE
        token = mine.ok("auth_token", {})["jwt"]
        with closing(Wire(server, token)) as by_token:
            assert by_token.ok("get_info", {"model_id": model_id})["lora_rank"] == 4


# --- dialects ------------------------------------------------------------------------------
def json_pass(model_id: str) -> dict[str, Any]:
    targets = {"data": [2], "dtype": "int64", "shape": [1]}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "loss_fn_inputs": {"target_tokens": targets},
    }
    work = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"forward_backward_input": work, "model_id": model_id, "seq_id": 1}


def test_skyrl_dialect() -> None:
    with StubServer(dialect="skyrl") as server, closing(Wire(server)) as wire:
        for name in ("client_dynamic_config", "telemetry", "auth_token"):
            assert wire.call(name, {}).status == 404
        assert len(server.calls("telemetry")) == 1
        model_id = wire.model()
        binary = encode_forward_backward_request(training_request(model_id, 1), False)
        refused = wire.call("forward_backward", binary, headers={"Content_Type": PROTO})
        assert refused.status == 415
        promise = wire.ok("forward_backward", json_pass(model_id))
        assert (promise["future_id"], promise["status"]) == (promise["request_id"], "pending")
        output = wire.result(promise, PROTO)
        assert output["loss_fn_outputs"][0]["logprobs"]["shape"] == [1]
        forward = {"forward_input": json_pass(model_id)["forward_backward_input"]}
        passed = wire.ok("forward", {**forward, "model_id": model_id, "seq_id": 2})
        assert wire.result(passed)["metrics"] == output["metrics"]
        sample = wire.sample(wire.sampler())
        assert "sample_sequence_ids" not in sample
        assert len(wire.result(sample, PROTO)["sequences"]) == 1
        save = {"model_id": model_id, "path": "one"}
        wire.result(wire.ok("save_weights", {**save, "seq_id": 3}))
        failed = wire.retrieve(wire.ok("save_weights", {**save, "seq_id": 4}))
        assert (failed.status, list(failed.json)) == (400, ["detail"])
        assert "overwrite=True" in failed.json["detail"]


def test_tuft_dialect() -> None:
    with (
        StubServer(dialect="tuft", work_seconds=1.0, long_poll_seconds=0.01) as server,
        closing(Wire(server)) as wire,
    ):
        assert wire.call("client_dynamic_config", {}).status == 404
        assert wire.ok("auth_token", {})["jwt"].startswith("eyJ")
        promise = wire.sample(wire.sampler())
        assert "sample_sequence_ids" not in promise
        assert wire.retrieve(promise).json == {
            "type": "try_again",
            "request_id": promise["request_id"],
            "queue_state": "active",
        }
        while b"try_again" in (reply := wire.retrieve(promise, PROTO)).content:
            pass
        assert len(decode_sample_response(reply.content).sequences) == 1


# --- downloads -----------------------------------------------------------------------------
def test_files_support_ranges_head_and_cut_responses(server: StubServer, wire: Wire) -> None:
    model_id = wire.model()
    save = {"model_id": model_id, "path": "export", "seq_id": 1}
    wire.result(wire.ok("save_weights_external", save))
    ids = {"training_run_id": model_id, "checkpoint_id": "external_weights/export"}
    url = urlsplit(wire.ok("external_weights_urls", ids=ids)["urls"]["adapter_model.safetensors"])
    place = f"{url.path}?{url.query}"
    whole = wire.request("GET", place)
    etag = whole.headers["etag"]
    part = wire.request("GET", place, Range="bytes=100-199", If_Range=etag)
    assert (part.status, part.content) == (206, whole.content[100:200])
    assert part.headers["content-range"] == f"bytes 100-199/{len(whole.content)}"
    assert wire.request("GET", place, Range="bytes=100-", If_Range='"old"').status == 200
    assert wire.request("GET", place, Range="bytes=99999999-").status == 416
    head = wire.request("HEAD", place)
    assert (head.content, head.headers["content-length"]) == (b"", str(len(whole.content)))
    server.inject("download", Fault(cut_after_bytes=1000))
    with pytest.raises(http.client.IncompleteRead):
        wire.request("GET", place)
    wire.close()
    redirect = wire.call("checkpoint_archive", ids=ids, headers={"Accept": "*/*"})
    assert redirect.status == 302
    target = urlsplit(redirect.headers["location"])
    with tarfile.open(
        fileobj=io.BytesIO(wire.request("GET", f"{target.path}?{target.query}").content)
    ) as tar:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(tar.getnames())
    wire.ok("delete_checkpoint", ids=ids)
    assert wire.request("GET", place).status == 404


# --- nonsense ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "body", "status", "detail"),
    [
        ("optim_step", b"{", 422, "truncated"),
        ("optim_step", {"model_id": 3}, 422, "model_id"),
        ("get_info", {"model_id": "no"}, 404, "model 'no'"),
        ("forward_backward", json_pass("m"), 415, "application/json"),
        ("load_weights", {"path": "tinker://a/weights/b", "optimizer": False}, 422, "model_id"),
    ],
)
def test_invalid_request_is_rejected(
    wire: Wire, name: str, body: Any, status: int, detail: str
) -> None:
    reply = wire.call(name, body)
    assert reply.status == status
    assert detail in reply.json["detail"]


def test_unknown_base_model_and_unknown_path_are_rejected(server: StubServer, wire: Wire) -> None:
    body = {"session_id": wire.session(), "model_seq_id": 0, "base_model": "gpt"}
    reply = wire.call("create_model", body)
    assert (reply.status, "'gpt'" in reply.json["detail"]) == (400, True)
    assert wire.request("POST", f"{PREFIX}/nowhere", {}).status == 404
    assert server.calls()[-1].endpoint == ""
    assert wire.call("list_sessions", query="?limit=-1").status == 422


def test_large_chunked_body_is_read_and_the_connection_closed(
    server: StubServer, wire: Wire
) -> None:
    pieces = iter([b'{"sdk_version": "', b"x" * 200_000, b'"}'])
    headers = {"Content-Type": JSON, "Connection": "close"}
    wire.connection.request("POST", f"{PREFIX}/client/config", pieces, headers)
    reply = Reply(wire.connection.getresponse())
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert len(server.calls("client_config")[0].message["sdk_version"]) == 200_000
