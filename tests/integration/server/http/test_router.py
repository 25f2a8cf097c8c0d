from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import random
import tracemalloc
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.support.asgi_client import Reply, send_request
from tests.support.server_harness import API, KEY, OTHER_KEY, ServerHarness, open_harness
from tinkex.errors import (
    BadRequestError,
    CheckpointError,
    ConflictError,
    InvalidInput,
    NotFoundError,
    PromiseExpiredError,
    RateLimitError,
    StoreBusy,
    UnprocessableEntityError,
)
from tinkex.server.http.request_context import (
    MAX_ACTIVE_REQUESTS,
    RawResponse,
    RequestContext,
    Services,
)
from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    ModelInput,
    TensorData,
)
from tinkex.wire.codec import compress_zstd, encode_json
from tinkex.wire.endpoints import SMALL_BODY_BYTES
from tinkex.wire.proto import encode_forward_backward_request

MEBI = 1024 * 1024
LIMIT = SMALL_BODY_BYTES
CONFIG = f"{API}/client/config"
PASS = f"{API}/forward_backward"


class RecordingHandler:
    """A handler that records its calls and returns or raises a given value."""

    def __init__(self) -> None:
        self.calls: list[RequestContext[Any]] = []
        self.reply: Any = {}

    async def __call__(self, services: Services, call: RequestContext[Any]) -> Any:
        self.calls.append(call)
        if isinstance(self.reply, BaseException):
            raise self.reply
        return self.reply

    @property
    def call(self) -> RequestContext[Any]:
        return self.calls[-1]


NAMES = (
    "client_config",
    "forward_backward",
    "forward",
    "asample",
    "publish_checkpoint",
    "unpublish_checkpoint",
    "delete_checkpoint",
    "get_training_run",
    "list_training_runs",
    "set_checkpoint_ttl",
    "auth_token",
)


@pytest.fixture
def handler() -> RecordingHandler:
    return RecordingHandler()


@pytest.fixture
def recording_harness(tmp_path: Path, handler: RecordingHandler) -> Iterator[ServerHarness]:
    """A server with a recording handler and the small body limit for all endpoints."""
    routes: dict[str, Any] = dict.fromkeys(NAMES, handler)
    with open_harness(tmp_path / "home", routes, max_body_bytes=LIMIT) as opened:
        yield opened


def post_pieces(harness: ServerHarness, path: str, *pieces: bytes | None, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(send_request(harness.client.app, "POST", path, pieces or (b"",), named))


def make_pass_request(model_id: str = "s:train:0", **tensors: TensorData) -> ForwardBackwardRequest:
    datum = Datum(ModelInput.from_ints([1, 2, 3]), tensors)
    return ForwardBackwardRequest(
        ForwardBackwardInput([datum], "cross_entropy", {"beta": 0.5}), model_id, 7
    )


# --- how many at once ------------------------------------------------------------------------
class GatedHandler(RecordingHandler):
    """A handler that blocks until its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()

    async def __call__(self, services: Services, call: RequestContext[Any]) -> Any:
        self.calls.append(call)
        await self.opened.wait()
        return {}


def test_tenant_concurrency_limit_queues_own_requests(tmp_path: Path) -> None:
    gate = GatedHandler()
    paths = {"client_config": CONFIG, "session_heartbeat": f"{API}/session_heartbeat"}

    async def post(harness: ServerHarness, name: str, key: str = KEY) -> Reply:
        body = b'{"session_id": "s", "sdk_version": "1"}'
        return await send_request(
            harness.client.app, "POST", paths[name], (body,), {"x-api-key": key}
        )

    async def active(num: int) -> list[str]:
        """Wait for this many requests in progress; return their tenants."""
        async with asyncio.timeout(10):
            while len(gate.calls) < num:
                await asyncio.sleep(0.001)
        return [call.tenant_id for call in gate.calls]

    async def burst(harness: ServerHarness) -> None:
        requests = [asyncio.create_task(post(harness, "client_config")) for _ in range(20)]
        assert await active(MAX_ACTIVE_REQUESTS) == [harness.tenant_id] * MAX_ACTIVE_REQUESTS
        requests.append(asyncio.create_task(post(harness, "client_config", OTHER_KEY)))
        assert (await active(MAX_ACTIVE_REQUESTS + 1))[-1] == harness.other_tenant_id
        requests.append(asyncio.create_task(post(harness, "session_heartbeat")))
        await active(MAX_ACTIVE_REQUESTS + 2)
        assert gate.call.endpoint == "session_heartbeat"
        requests[0].cancel()
        requests[19].cancel()
        await active(MAX_ACTIVE_REQUESTS + 3)
        gate.opened.set()
        replies = await asyncio.gather(*requests, return_exceptions=True)
        assert [reply.status for reply in replies if isinstance(reply, Reply)] == [200] * 20

    with open_harness(tmp_path / "home", dict.fromkeys(paths, gate)) as harness:
        asyncio.run(burst(harness))


# --- how much ------------------------------------------------------------------------------
def test_oversized_content_length_is_rejected_unread(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    reply = post_pieces(recording_harness, CONFIG, b"{}", content_length=str(LIMIT + 1))

    assert reply.status == 413
    assert reply.num_read == 0
    assert str(LIMIT) in reply.error
    assert not handler.calls


def test_body_without_content_length_is_limited(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    reply = post_pieces(recording_harness, CONFIG, *repeat(b"x" * (LIMIT // 8), 1000))

    assert reply.status == 413
    assert reply.num_read == 9
    assert not handler.calls


@pytest.mark.parametrize("declared", ["0", "7", "-1", "x", "1e9", "", "9" * 5000])
def test_body_longer_than_content_length_is_limited(
    recording_harness: ServerHarness, declared: str
) -> None:
    reply = post_pieces(
        recording_harness, CONFIG, *repeat(b"x" * (LIMIT // 2), 10), content_length=declared
    )

    assert reply.status == 413
    assert reply.num_read <= 3


def test_body_of_exactly_the_limit_is_read(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    text = b'{"sdk_version":"%s"}'
    body = text % (b"x" * (LIMIT - len(text) + 2))
    assert len(body) == LIMIT

    assert post_pieces(recording_harness, CONFIG, body[:100], body[100:]).status == 200
    assert handler.call.body == body


def test_disconnected_client_does_not_reach_handler(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    post_pieces(recording_harness, CONFIG, b'{"sdk', None)

    assert not handler.calls


def test_small_body_limit_for_endpoints_without_tensors(
    tmp_path: Path, handler: RecordingHandler
) -> None:
    body = b'{"tags":[],"sdk_version":"1","user_metadata":[' + b"{}," * (8 * MEBI // 3) + b"{}]}"
    packed = compress_zstd(body)
    assert len(packed) < 1000

    with open_harness(tmp_path / "home", {"create_session": handler}) as harness:
        session = f"{API}/create_session"
        refused = post_pieces(harness, session, packed, content_encoding="zstd")
        plain = post_pieces(harness, session, body)
        text = post_pieces(harness, session, b'{"user_metadata": "%s"}' % (b"x" * 70_000))

    assert (refused.status, plain.status, text.status) == (422, 413, 422)
    assert f"the limit is {SMALL_BODY_BYTES}" in refused.error
    assert "user_metadata has 70002 bytes" in text.error
    assert not handler.calls


def test_json_with_too_many_objects_is_rejected_before_decoding(
    tmp_path: Path, handler: RecordingHandler
) -> None:
    packed = compress_zstd(b'{"forward_input":[' + b"{}," * 2_000_000 + b"{}]}")

    with open_harness(tmp_path / "home", {"forward": handler}) as harness:
        refused = post_pieces(harness, f"{API}/forward", packed, content_encoding="zstd")

    assert refused.status == 422
    assert "objects and lists" in refused.error


def test_request_bodies_share_byte_budget(tmp_path: Path, handler: RecordingHandler) -> None:
    options = {"max_body_bytes": 3000, "max_inflight_bytes": 5000}
    with open_harness(tmp_path / "home", {"client_config": handler}, **options) as harness:
        # Decompressed, the body is counted twice, which exceeds the tenant's budget.
        body = b'{"sdk_version":"%s"}' % bytes(random.choices(b"abcdefgh", k=2900))
        refused = post_pieces(harness, CONFIG, compress_zstd(body), content_encoding="zstd")
        accepted = [post_pieces(harness, CONFIG, body).status for _ in range(3)]

    assert (refused.status, accepted) == (429, [200, 200, 200])
    assert refused.headers["retry-after"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"sdk_version":"\xff"}',
        b'{"\xc3\x28":1,"sdk_version":"1"}',
        b'{"sdk_version":"\xed\xa0\x80"}',
        b"\xff\xfe{}",
    ],
)
def test_invalid_utf8_returns_error_message(
    recording_harness: ServerHarness, handler: RecordingHandler, body: bytes
) -> None:
    reply = post_pieces(recording_harness, CONFIG, body)

    assert reply.status == 422
    assert reply.error
    assert not handler.calls


def test_body_is_not_read_without_key(recording_harness: ServerHarness) -> None:
    reply = post_pieces(recording_harness, CONFIG, *repeat(b"x" * LIMIT, 5), x_api_key="tml-nobody")

    assert (reply.status, reply.num_read) == (401, 0)


def _bomb(num_bytes: int, *, says_size: bool) -> bytes:
    packed = io.BytesIO()
    size = num_bytes if says_size else -1
    with zstandard.ZstdCompressor().stream_writer(packed, size=size, closefd=False) as writer:
        for _ in range(num_bytes // MEBI):
            writer.write(bytes(MEBI))
    return packed.getvalue()


@pytest.mark.parametrize("says_size", [True, False])
def test_decompression_bomb_is_rejected_with_bounded_memory(
    recording_harness: ServerHarness, says_size: bool
) -> None:
    bomb = _bomb(512 * MEBI, says_size=says_size)
    assert len(bomb) < LIMIT

    tracemalloc.start()
    try:
        reply = post_pieces(
            recording_harness,
            PASS,
            bomb,
            content_encoding="zstd",
            content_type="application/x-protobuf",
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert reply.status == 422
    assert "unpacks to" in reply.error
    assert peak < 80 * MEBI


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd, zstd", "x" * 999])
def test_unknown_content_encoding_returns_415(
    recording_harness: ServerHarness, handler: RecordingHandler, encoding: str
) -> None:
    reply = post_pieces(recording_harness, CONFIG, b"{}", content_encoding=encoding)

    assert reply.status == 415
    assert not handler.calls


def test_protobuf_is_rejected_for_json_endpoints(recording_harness: ServerHarness) -> None:
    assert (
        post_pieces(recording_harness, CONFIG, b"", content_type="application/x-protobuf").status
        == 415
    )


def test_huge_sparse_tensor_is_rejected(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    rows, cols = 8, 1 << 40
    huge = TensorData([1], "int64", [rows, cols], [0, 1] + [1] * (rows - 1), [5])
    body = encode_forward_backward_request(make_pass_request(target_tokens=huge))

    reply = post_pieces(recording_harness, PASS, body, content_type="application/x-protobuf")

    assert reply.status == 422
    assert "cells" in reply.error
    assert not handler.calls


def test_sparse_tensors_share_one_limit(recording_harness: ServerHarness) -> None:
    part = TensorData([1], "int64", [1, 40 * MEBI], [0, 1], [5])
    body = encode_json(
        ForwardBackwardRequest(
            ForwardBackwardInput(
                [Datum(ModelInput.from_ints([1]), {"target_tokens": part})] * 2, "cross_entropy"
            ),
            "m",
            1,
        )
    )

    assert post_pieces(recording_harness, PASS, body).status == 422


def test_huge_sparse_tensor_in_sample_is_rejected(
    recording_harness: ServerHarness,
) -> None:
    body = {
        "prompt": {"chunks": []},
        "sampling_params": {},
        "target_prompt_logprobs": {
            "data": [1],
            "dtype": "int64",
            "shape": [1, 1 << 50],
            "sparse_crow_indices": [0, 1],
            "sparse_col_indices": [0],
        },
    }

    answer = recording_harness.post("/asample", body)

    assert answer.status_code == 422
    assert "cells" in answer.json()["error"]


# --- reading -------------------------------------------------------------------------------
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_forward_only", [False, True])
def test_protobuf_pass_is_decoded(
    recording_harness: ServerHarness,
    handler: RecordingHandler,
    is_packed: bool,
    is_forward_only: bool,
) -> None:
    request = make_pass_request(target_tokens=TensorData([1, 2, 3], "int64"))
    content = encode_forward_backward_request(request, is_forward_only)
    headers = {"content_type": "application/x-protobuf"}
    if is_packed:
        headers["content_encoding"] = "zstd"

    reply = post_pieces(
        recording_harness, PASS, compress_zstd(content) if is_packed else content, **headers
    )

    assert reply.status == 200
    assert handler.call.is_proto
    assert handler.call.body == content
    if is_forward_only:
        work_ = request.forward_backward_input
        assert handler.call.request == ForwardRequest(work_, request.model_id, request.seq_id)
    else:
        assert handler.call.request == request


def test_large_pass_is_decoded(recording_harness: ServerHarness, handler: RecordingHandler) -> None:
    tokens = TensorData(list(range(25_000)), "int64")
    content = encode_forward_backward_request(make_pass_request(target_tokens=tokens))
    assert 200_000 < len(content) < LIMIT

    assert (
        post_pieces(recording_harness, PASS, content, content_type="application/x-protobuf").status
        == 200
    )
    read = handler.call.request.forward_backward_input.data[0].loss_fn_inputs["target_tokens"]
    assert read == tokens


def test_json_pass_is_decoded(recording_harness: ServerHarness, handler: RecordingHandler) -> None:
    request = make_pass_request(target_tokens=TensorData([1, 2, 3], "int64"))
    forward = ForwardRequest(request.forward_backward_input, request.model_id, request.seq_id)

    assert post_pieces(recording_harness, PASS, encode_json(request)).status == 200
    assert (handler.call.request, handler.call.is_proto) == (request, False)
    assert post_pieces(recording_harness, f"{API}/forward", encode_json(forward)).status == 200
    assert (handler.call.request, handler.call.is_proto) == (forward, False)


def test_compressed_json_is_decoded(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    body = compress_zstd(b'{"sdk_version": "1"}')

    assert post_pieces(recording_harness, CONFIG, body, content_encoding="ZSTD").status == 200
    assert handler.call.request.sdk_version == "1"
    assert handler.call.body == b'{"sdk_version": "1"}'


def test_missing_body_is_empty_object(recording_harness: ServerHarness) -> None:
    assert post_pieces(recording_harness, f"{API}/auth/token").status == 200
    missing = post_pieces(recording_harness, CONFIG)
    assert missing.status == 422
    assert "sdk_version" in missing.error


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"sdk_version": 1}',
        b'{"sdk_version": "\\ud800"}',
        b'{"sdk_version": "a\\u0000b"}',
        b'{"sdk_version": "1", "x": ' + b"[" * 100_000,
    ],
)
def test_invalid_body_returns_422(
    recording_harness: ServerHarness, handler: RecordingHandler, body: bytes
) -> None:
    reply = post_pieces(recording_harness, CONFIG, body)

    assert reply.status == 422
    assert reply.error
    assert not handler.calls


def test_escaped_backslash_in_json(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    assert post_pieces(recording_harness, CONFIG, rb'{"sdk_version": "a\\u0000"}').status == 200
    assert handler.call.request.sdk_version == "a\\u0000"


@pytest.mark.parametrize("model_id", ["", "a/b", "a\x00b", "a b", ".."])
def test_invalid_model_id_in_protobuf_is_rejected(
    recording_harness: ServerHarness, model_id: str
) -> None:
    body = encode_forward_backward_request(make_pass_request(model_id))

    assert (
        post_pieces(recording_harness, PASS, body, content_type="application/x-protobuf").status
        == 422
    )


def test_request_context_headers_and_base_url(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    recording_harness.post(
        "/client/config", {"sdk_version": "1"}, headers={"X-Odd": "1", "Host": "me:8000"}
    )

    assert handler.call.headers["x-odd"] == "1"
    assert handler.call.base_url == "http://me:8000"


# --- paths and queries ---------------------------------------------------------------------
def test_run_ids_have_colons_and_checkpoint_ids_two_segments(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    path = "/training_runs/4a-b:train:0/checkpoints/sampler_weights/step-1"

    for method, tail, name in (
        ("DELETE", "", "delete_checkpoint"),
        ("POST", "/publish", "publish_checkpoint"),
        ("DELETE", "/publish", "unpublish_checkpoint"),
    ):
        assert recording_harness.send_request(method, path + tail).status_code == 200
        assert handler.call.endpoint == name
        assert handler.call.ids == {
            "training_run_id": "4a-b:train:0",
            "checkpoint_id": "sampler_weights/step-1",
        }
    assert (
        recording_harness.send_request("PUT", path + "/ttl", json={"ttl_seconds": None}).status_code
        == 200
    )
    assert handler.call.request.ttl_seconds is None


@pytest.mark.parametrize(
    "path",
    [
        "/training_runs/a%20b",
        "/training_runs/a%00b",
        "/training_runs/%2e%2e",
        "/training_runs/a%3Fb",
        "/training_runs/r/checkpoints/other/0001",
        "/training_runs/r/checkpoints/weights/-x",
        "/training_runs/r/checkpoints/weights/a%20b",
    ],
)
def test_invalid_id_in_path_is_rejected(
    recording_harness: ServerHarness, handler: RecordingHandler, path: str
) -> None:
    method = "DELETE" if "checkpoints" in path else "GET"

    assert recording_harness.send_request(method, path).status_code in {404, 422}
    assert not handler.calls


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=x",
        "limit=",
        "limit=-1",
        "limit=1&limit=2",
        "offset=-1",
        "offset=99999999999999999999",
        "access_scope=mine",
        "project_id=",
        "project_id=a%00b",
        "colour=red",
        "limit=%ff",
        "&".join(f"x{n}=1" for n in range(100)),
    ],
)
def test_invalid_query_returns_422(
    recording_harness: ServerHarness, handler: RecordingHandler, query: str
) -> None:
    answer = recording_harness.send_request("GET", f"/training_runs?{query}")

    assert answer.status_code == 422, answer.text
    assert not handler.calls


def test_valid_query_is_decoded(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    recording_harness.send_request(
        "GET", "/training_runs?limit=5&offset=0&access_scope=accessible&project_id=p%3A1"
    )

    assert handler.call.query == {
        "limit": "5",
        "offset": "0",
        "access_scope": "accessible",
        "project_id": "p:1",
    }


@pytest.mark.parametrize("path", ["/nothing", "/api/v1/nothing", "/api/v1", "/", "/api/v2/healthz"])
def test_unknown_path_returns_json_error(recording_harness: ServerHarness, path: str) -> None:
    answer = recording_harness.client.get(path)

    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"] == f"no such endpoint: GET {path}"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "TRACE"])
def test_wrong_method_returns_json_error(recording_harness: ServerHarness, method: str) -> None:
    answer = recording_harness.send_request(method, "/client/config")

    assert answer.status_code == 405
    assert "POST" in answer.headers["allow"]
    assert answer.headers["content-type"] == "application/json"
    assert method == "HEAD" or "allowed: POST" in answer.json()["error"]


def test_invalid_host_header_returns_json_error(recording_harness: ServerHarness) -> None:
    answer = recording_harness.post(
        "/client/config", {"sdk_version": "1"}, headers={"Host": "a b/../c"}
    )

    assert answer.status_code == 400
    assert answer.json()["error"]


# --- answering -----------------------------------------------------------------------------
def test_raw_response_is_sent_unchanged(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    handler.reply = RawResponse(
        status=302, body=b"there", content_type="text/x-odd", headers={"location": "/x"}
    )

    answer = recording_harness.post("/client/config", {"sdk_version": "1"}, follow_redirects=False)

    assert (answer.status_code, answer.content) == (302, b"there")
    assert answer.headers["content-type"] == "text/x-odd"
    assert answer.headers["location"] == "/x"
    assert answer.headers["content-length"] == "5"


def test_none_response_is_empty_object(
    recording_harness: ServerHarness, handler: RecordingHandler
) -> None:
    handler.reply = None

    assert recording_harness.post("/client/config", {"sdk_version": "1"}).json() == {}


@pytest.mark.parametrize(
    ("error", "status", "category"),
    [
        (BadRequestError("no"), 400, "user"),
        (NotFoundError("no"), 404, "user"),
        (ConflictError("no"), 409, "server"),
        (PromiseExpiredError("no"), 410, "server"),
        (UnprocessableEntityError("no"), 422, "user"),
        (InvalidInput("no"), 422, "user"),
        (OverflowError("no"), 422, "user"),
        (CheckpointError("no"), 500, "server"),
    ],
)
def test_errors_have_status_message_and_category(
    recording_harness: ServerHarness,
    handler: RecordingHandler,
    error: Exception,
    status: int,
    category: str,
) -> None:
    handler.reply = error

    answer = recording_harness.post("/client/config", {"sdk_version": "1"})

    assert answer.status_code == status
    assert "no" in answer.json()["error"]
    assert answer.json()["category"] == category
    assert int(answer.headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("error", "status", "seconds"),
    [
        (RateLimitError("later", retry_after_seconds=2.5), 429, "2"),
        (RateLimitError("later", retry_after_seconds=0.2), 429, "1"),
        (StoreBusy("later"), 503, "1"),
    ],
)
def test_retryable_errors_have_retry_after(
    recording_harness: ServerHarness,
    handler: RecordingHandler,
    error: Exception,
    status: int,
    seconds: str,
) -> None:
    handler.reply = error

    answer = recording_harness.post("/client/config", {"sdk_version": "1"})

    assert answer.status_code == status
    assert answer.headers["retry-after"] == seconds


def test_internal_error_is_logged_with_incident_id(
    recording_harness: ServerHarness, handler: RecordingHandler, caplog: pytest.LogCaptureFixture
) -> None:
    handler.reply = ZeroDivisionError("a secret of the server")

    with caplog.at_level(logging.ERROR):
        answer = recording_harness.post("/client/config", {"sdk_version": "1"})

    assert answer.status_code == 500
    assert "secret" not in answer.text
    incident = json.loads(answer.text)["error"].rsplit(" ", 1)[1]
    assert incident in caplog.text
    assert "a secret of the server" in caplog.text


def test_full_disk_returns_retryable_503_without_path(
    recording_harness: ServerHarness, handler: RecordingHandler, caplog: pytest.LogCaptureFixture
) -> None:
    handler.reply = OSError(errno.ENOSPC, "No space left on device", "/srv/secret/file")

    answer = recording_harness.post("/client/config", {"sdk_version": "1"})

    assert (answer.status_code, answer.json()["category"]) == (503, "server")
    assert answer.headers["retry-after"] == "1"
    assert "the server's disk is full" in answer.json()["error"]
    assert "secret" not in answer.text
    assert "/srv/secret/file" in caplog.text
    handler.reply = OSError(errno.EIO, "broken")
    assert recording_harness.post("/client/config", {"sdk_version": "1"}).status_code == 500
