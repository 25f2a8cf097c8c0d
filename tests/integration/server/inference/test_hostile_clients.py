"""Clients that vanish, do not read, never finish or send too much do not affect other tenants."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import tinkex
from tests.integration.server.inference.conftest import (
    KEY,
    MODEL,
    OTHER_KEY,
    TIMEOUT_SECONDS,
    Connect,
    chat_body,
    complete,
)
from tinkex.server.http.request_body import ClientDisconnected
from tinkex.server.inference import (
    anthropic_endpoints,
    inference_reply,
    openai_chat,
    openai_completions,
    openai_tokenizers,
)
from tinkex.server.inference.chat_request import ChatRequest
from tinkex.server.inference.error_bodies import ApiFamily
from tinkex.server.inference.inference_call import EventStream
from tinkex.server.inference.inference_reply import Reply
from tinkex.server.inference.inference_router import MAX_JSON_CONTAINERS
from tinkex.testing import StubServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
#: As many sequences as one request may have, none of which ends early.
LONG = {"model": MODEL, "prompt": [1, 2, 3], "n": 128, "max_tokens": 64, "stream": True}
NUM_CLIENTS = 32


def request_bytes(path: str, body: dict[str, Any], key: str = KEY) -> bytes:
    """A request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {key}"]
    head += ["Content-Type: application/json", f"Content-Length: {len(content)}", "", ""]
    return "\r\n".join(head).encode() + content


@pytest.fixture
def open_socket(server: StubServer) -> Iterator[Any]:
    """Opens connections that close with the test."""
    parts = urlsplit(server.url)
    address = (parts.hostname, parts.port)
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(address, TIMEOUT_SECONDS))


def check_other_tenant(connect: Connect) -> None:
    answer = complete(connect(OTHER_KEY), CHAT, chat_body("fine"))
    assert answer["choices"][0]["message"]["content"] == "fine"


def count_ended(connect: Connect, status: int) -> int:
    """How many text completions have ended with a status."""
    labels = f'{{endpoint="completions",family="openai",status="{status}"}}'
    found = re.search(
        rf"^tinkex_inference_requests_total{re.escape(labels)} (\S+)",
        connect().get("/metrics").text,
        re.MULTILINE,
    )
    return int(float(found[1])) if found else 0


def test_requests_of_clients_that_vanish_end(open_socket: Any, connect: Connect) -> None:
    before = [count_ended(connect, status) for status in (200, 499)]
    connections = [open_socket() for _ in range(NUM_CLIENTS)]
    for connection in connections:
        connection.sendall(request_bytes(TEXT, LONG))
    for connection in connections[::2]:
        assert connection.recv(64).startswith(b"HTTP/1.1 200 ")
    for connection in connections:
        connection.close()
    check_other_tenant(connect)
    ends_at = time.monotonic() + TIMEOUT_SECONDS
    while True:
        ended = [count_ended(connect, status) for status in (200, 499)]
        if sum(ended) - sum(before) == NUM_CLIENTS:
            break
        assert time.monotonic() < ends_at, f"requests without a client run on: {before}, {ended}"
        time.sleep(0.02)
    assert ended[1] > before[1]


def test_clients_that_do_not_read_are_not_in_the_way(open_socket: Any, connect: Connect) -> None:
    for _ in range(NUM_CLIENTS):
        open_socket().sendall(request_bytes(TEXT, LONG | {"logprobs": 20}))
    check_other_tenant(connect)


def test_requests_that_never_end_are_not_in_the_way(open_socket: Any, connect: Connect) -> None:
    whole = request_bytes(CHAT, chat_body("never"))
    for index in range(3 * NUM_CLIENTS):
        open_socket().sendall(whole[: (4, 60, len(whole) - 1)[index % 3]])
    check_other_tenant(connect)


def test_all_streams_of_one_request_are_complete(client: httpx.Client) -> None:
    reply = client.post(TEXT, json=LONG)
    assert reply.text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]]
    finished = [each["choices"][0] for each in events if each["choices"][0]["finish_reason"]]
    assert sorted(each["index"] for each in finished) == list(range(128))


def test_foreign_checkpoints_look_like_missing_ones(server: StubServer, connect: Connect) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=KEY) as service:
        training = service.create_lora_training_client(MODEL, rank=8)
        path = training.save_weights_for_sampler("mine").result().path
    assert connect(KEY).post(CHAT, json=chat_body("x", model=path)).status_code == 200
    missing = path.replace("mine", "none")
    foreign, unknown = (
        connect(OTHER_KEY).post(CHAT, json=chat_body("x", model=each)) for each in (path, missing)
    )
    assert (foreign.status_code, unknown.status_code) == (404, 404)
    assert foreign.text.replace("mine", "none") == unknown.text


@pytest.mark.parametrize(
    ("module", "path"),
    [
        (openai_chat, CHAT),
        (anthropic_endpoints, "/v1/messages"),
        (anthropic_endpoints, "/v1/messages/count_tokens"),
        (openai_tokenizers, "/tokenize"),
    ],
)
def test_messages_are_read_on_a_thread(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, module: Any, path: str
) -> None:
    """Millions of content blocks would block the event loop."""
    names: list[str] = []

    def read(request: Any) -> ChatRequest:
        names.append(threading.current_thread().name)
        return to_chat_request(request)

    to_chat_request = module.to_chat_request
    monkeypatch.setattr(module, "to_chat_request", read)
    body = chat_body("fine", max_tokens=8)
    assert client.post(path, json=body).status_code == 200
    assert len(names) == 1
    assert names[0].startswith("text")


@pytest.mark.parametrize(
    ("module", "check", "path", "body"),
    [
        (openai_completions, "split_prompts", TEXT, {"prompt": [1] * 10}),
        (openai_tokenizers, "_check_tokens", "/detokenize", {"tokens": [1] * 10}),
    ],
)
def test_token_ids_are_read_on_a_thread(
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    check: str,
    path: str,
    body: Any,
) -> None:
    names: list[str] = []
    original = getattr(module, check)

    def read(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return original(*arguments)

    monkeypatch.setattr(module, check, read)
    assert client.post(path, json={"model": MODEL, **body}).status_code == 200
    assert [name[:4] for name in names] == ["text"]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_body_of_too_many_parts_is_refused(client: httpx.Client, path: str) -> None:
    parts = b",".join([b'{"type":"text","text":""}'] * MAX_JSON_CONTAINERS)
    body = b'{"model":"%s","max_tokens":1,"messages":[{"role":"user","content":[%s]}]}'
    reply = client.post(path, content=body % (MODEL.encode(), parts))
    assert reply.status_code == 400
    assert "objects and lists" in reply.json()["error"]["message"]


def test_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_reply, "SEND_SECONDS", 0.01)
    closed: list[bool] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def chunks() -> Any:
        yield b"data: 1\n\n"

    stream = EventStream(
        chunks=chunks(),
        keep_alive=b"",
        encode_error=lambda failure: b"",
        close=lambda: closed.append(True),
    )
    reply = Reply(ApiFamily.OPENAI, "id", send)
    with pytest.raises(ClientDisconnected, match="read nothing"):
        asyncio.run(reply.send_stream(stream))
    assert closed == [True]
