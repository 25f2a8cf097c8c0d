"""Fuzz requests: every response is an error message, and none is a server error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.asgi_client import Reply, send_request
from tests.support.server_harness import API, ServerHarness, open_harness
from tinkex.types import Datum, ForwardBackwardInput, ForwardBackwardRequest, ModelInput, TensorData
from tinkex.wire.codec import compress_zstd
from tinkex.wire.endpoints import ENDPOINTS, BodyFormat
from tinkex.wire.proto import encode_forward_backward_request

PASS = f"{API}/forward_backward"
PROTO = {"content-type": "application/x-protobuf"}
GOOD = encode_forward_backward_request(
    ForwardBackwardRequest(
        ForwardBackwardInput(
            [
                Datum(
                    ModelInput.from_ints([1, 2, 3]),
                    {
                        "target_tokens": TensorData([1, 0, 0, 2], "int64", [2, 2]),
                        "weights": TensorData([1.0], "float32", [1, 9], [0, 1], [3]),
                    },
                )
            ],
            "cross_entropy",
            {"a": 1.0, "b": "c"},
        ),
        "s:train:0",
        1,
    )
)
MODEST = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHarness]:
    root: Path = tmp_path_factory.mktemp("fuzzed")
    with open_harness(root, max_body_bytes=1024 * 1024) as opened:
        yield opened


def send(harness: ServerHarness, path: str, body: bytes, headers: dict[str, str]) -> Reply:
    return asyncio.run(send_request(harness.client.app, "POST", path, (body, b""), headers))


def check_refused(reply: Reply) -> None:
    assert 400 <= reply.status < 500, reply.body
    assert reply.error


@MODEST
@given(st.binary(max_size=300))
def test_fuzz_protobuf_bytes(fuzzed: ServerHarness, body: bytes) -> None:
    check_refused(send(fuzzed, PASS, body, PROTO))


@MODEST
@given(st.data())
def test_fuzz_mutated_protobuf_pass(fuzzed: ServerHarness, data: st.DataObject) -> None:
    body = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    # The mutated request names a model that does not exist.
    check_refused(send(fuzzed, PASS, bytes(body[:cut]), PROTO))


@MODEST
@given(st.binary(max_size=300))
def test_fuzz_zstd_bytes(fuzzed: ServerHarness, body: bytes) -> None:
    check_refused(send(fuzzed, PASS, body, {**PROTO, "content-encoding": "zstd"}))


@MODEST
@given(st.data())
def test_fuzz_mutated_zstd_pass(fuzzed: ServerHarness, data: st.DataObject) -> None:
    body = bytearray(compress_zstd(GOOD))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    check_refused(send(fuzzed, PASS, bytes(body), {**PROTO, "content-encoding": "zstd"}))


@MODEST
@given(st.sampled_from(sorted(ENDPOINTS)), st.binary(max_size=200))
def test_fuzz_json_bytes(fuzzed: ServerHarness, name: str, body: bytes) -> None:
    row = ENDPOINTS[name]
    if (
        row.body is not BodyFormat.JSON
        or row.method != "POST"
        or "{" in row.path
        or row.is_long_poll
    ):
        return
    assert send(fuzzed, API + row.path, body, {}).status < 500


@MODEST
@given(st.data())
def test_fuzz_field_values(fuzzed: ServerHarness, data: st.DataObject) -> None:
    row = ENDPOINTS[data.draw(st.sampled_from(JSON_ROWS))]
    fields = getattr(row.request, "__struct_fields__", ()) or ("model_id", "forward_input")
    message = {
        field: data.draw(FITTING.get(field, JSON_VALUES) | JSON_VALUES, label=field)
        for field in fields
        if data.draw(st.booleans())
    }
    reply = send(fuzzed, API + row.path, _encode(message), {})
    assert reply.status < 500, (row.name, message, reply.body)


JSON_ROWS = sorted(
    row.name
    for row in ENDPOINTS.values()
    if row.body is not BodyFormat.NONE and "{" not in row.path and not row.is_long_poll
)
#: Values of the right type, so that some messages pass their decoder.
FITTING: dict[str, st.SearchStrategy[Any]] = {
    "session_id": st.text(),
    "model_id": st.text(),
    "sdk_version": st.text(),
    "tags": st.lists(st.text(), max_size=3),
    "user_metadata": st.dictionaries(st.text(), st.text(), max_size=3),
    "seq_id": st.integers(),
    "model_seq_id": st.integers(),
    "path": st.text(),
    "tinker_path": st.text(),
    "base_model": st.text(),
    "lora_config": st.fixed_dictionaries({"rank": st.integers()}),
    "prompt": st.just({"chunks": [{"type": "encoded_text", "tokens": [1]}]}),
    "sampling_params": st.fixed_dictionaries({}, optional={"max_tokens": st.integers()}),
    "num_samples": st.integers(),
    "sampling_session_id": st.text(),
    "sampling_session_seq_id": st.integers(),
    "adam_params": st.just({}),
    "ttl_seconds": st.integers(),
    "request_id": st.text(),
}


def _encode(message: dict[str, Any]) -> bytes:
    import json

    # Python writes NaN and lone surrogates, which are not valid JSON.
    return json.dumps(message).encode()
