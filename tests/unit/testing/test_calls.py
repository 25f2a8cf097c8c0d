"""Calls, read late and waited for."""

from __future__ import annotations

import threading

import pytest

from tinkex.testing.calls import Call, CallLog
from tinkex.types import Datum, ForwardBackwardInput, ForwardBackwardRequest, ModelInput
from tinkex.wire.proto import encode_forward_backward_request


def call(endpoint: str = "asample", body: bytes = b"", **headers: str) -> Call:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Call(endpoint, "POST", f"/api/v1/{endpoint}", b"limit=2&x=", raw, body, {})


def test_call_decodes_headers_query_and_json_body() -> None:
    seen = call(body=b'{"a": 1}', x_api_key="tml-a", accept="application/x-protobuf")
    assert (seen.api_key, seen.headers["x-api-key"]) == ("tml-a", "tml-a")
    assert seen.query == {"limit": "2", "x": ""}
    assert seen.message == {"a": 1}
    assert seen.wants_proto
    assert not seen.forward_only
    assert call().message is None


def test_call_decodes_a_protobuf_body() -> None:
    datum = Datum(ModelInput.from_ints([1]), {"target_tokens": [2]})  # type: ignore[dict-item]
    request = ForwardBackwardRequest(ForwardBackwardInput([datum], "cross_entropy"), "model", 3)
    body = encode_forward_backward_request(request, True)
    seen = call("forward_backward", body, content_type="application/x-protobuf")
    assert (seen.message.model_id, seen.message.seq_id, seen.forward_only) == ("model", 3, True)


def test_wait_for_returns_calls_or_lists_those_seen() -> None:
    log = CallLog()
    thread = threading.Timer(0.02, log.add, [call()])
    thread.start()
    # It would hang if it waited for the whole time.
    assert [seen.endpoint for seen in log.wait_for("asample", 1, 3600.0)] == ["asample"]
    thread.join()
    with pytest.raises(AssertionError, match=r"expected 2 calls of asample .*saw 1.*asample 1"):
        log.wait_for("asample", 2, 0.01)
