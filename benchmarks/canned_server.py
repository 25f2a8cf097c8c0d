"""A server with fixed responses, so that figures measure the client: `-m benchmarks.canned_server`.

It executes nothing and stores nothing. The id of a future contains the size of its result.
"""

from __future__ import annotations

import functools
import itertools
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import uvicorn

from benchmarks import BASE_MODEL, NUM_SAMPLED_TOKENS, NUM_TRAINED_TOKENS
from tinkex.types import ForwardBackwardOutput, SampledSequence, SampleResponse, TensorData
from tinkex.wire.codec import decompress_zstd
from tinkex.wire.endpoints import ENDPOINTS, PREFIX
from tinkex.wire.proto import (
    decode_forward_backward_request,
    encode_forward_backward_output,
    encode_sample_response,
)

JSON, PROTO = b"application/json", b"application/x-protobuf"
MAX_REQUEST_BYTES = 1 << 28
MODEL_ID = "session:train:0"
#: Responses of endpoints that return no future.
RESPONSES: Mapping[str, Any] = {
    "client_config": {},
    "client_dynamic_config": {},
    "create_session": {"type": "create_session", "session_id": "session"},
    "create_sampling_session": {
        "type": "create_sampling_session",
        "sampling_session_id": "session:sample:0",
    },
    "get_info": {
        "type": "get_info",
        "model_id": MODEL_ID,
        "model_name": BASE_MODEL,
        "model_data": {"model_name": BASE_MODEL, "tokenizer_id": BASE_MODEL},
    },
    "session_heartbeat": {"type": "session_heartbeat"},
    "telemetry": {"status": "accepted"},
}
#: Results of futures, by the first part of their id.
RESULTS: Mapping[str, Any] = {
    "create_model": {"type": "create_model", "model_id": MODEL_ID},
    "optim_step": {"metrics": {"step": 1.0}},
}
NAMES = {PREFIX + row.path: name for name, row in ENDPOINTS.items()}
_request_numbers = itertools.count()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Serve one request."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    content, content_type = respond(NAMES.get(scope["path"], ""), body, dict(scope["headers"]))
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def respond(name: str, body: bytes, headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """The response of an endpoint, and its type."""
    if name == "asample":
        return promise("asample-1", sample_sequence_ids=["sequence"])
    if name == "forward_backward":
        is_compressed = headers.get(b"content-encoding") == b"zstd"
        message = decompress_zstd(body, MAX_REQUEST_BYTES) if is_compressed else body
        request, _ = decode_forward_backward_request(message)
        return promise(f"forward_backward-{len(request.forward_backward_input.data)}")
    if name in RESULTS:
        return promise(f"{name}-0")
    if name != "retrieve_future":
        return msgspec.json.encode(RESPONSES.get(name, {})), JSON
    kind, size, _ = msgspec.json.decode(body)["request_id"].split("-")
    if kind in RESULTS:
        return msgspec.json.encode(RESULTS[kind]), JSON
    return (sample_result() if kind == "asample" else training_result(int(size))), PROTO


def promise(prefix: str, **fields: Any) -> tuple[bytes, bytes]:
    """The response that names a future."""
    request_id = f"{prefix}-{next(_request_numbers)}"
    return msgspec.json.encode({"request_id": request_id, **fields}), JSON


@functools.cache
def sample_result() -> bytes:
    """A sequence of the length that the benchmark requests."""
    sequence = SampledSequence(
        stop_reason="length",
        sequence_id="",
        tokens_np=np.arange(NUM_SAMPLED_TOKENS, dtype=np.int32),
        logprobs_np=np.full(NUM_SAMPLED_TOKENS, -1.0, dtype=np.float32),
    )
    return encode_sample_response(SampleResponse(sequences=[sequence]))


@functools.cache
def training_result(num_examples: int) -> bytes:
    """Log-probabilities for examples of the length that the benchmark trains on."""
    logprobs = TensorData.from_numpy(np.full(NUM_TRAINED_TOKENS, -1.0, dtype=np.float32))
    output = ForwardBackwardOutput(
        loss_fn_output_type="scalar",
        loss_fn_outputs=[{"logprobs": logprobs}] * num_examples,
        metrics={"loss:sum": 1.0},
    )
    return encode_forward_backward_output(output)


def main() -> None:
    """Print the URL and serve until the process is terminated."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(app, loop="asyncio", lifespan="off", log_config=None, access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
