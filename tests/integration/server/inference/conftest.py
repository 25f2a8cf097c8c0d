"""Servers and clients of the inference tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tinkex.testing import SCRIPTED, StubServer, say, scripted_model

KEY = "tml-alice"
OTHER_KEY = "tml-bob"
MODEL = "tinkex/bigram"
TIMEOUT_SECONDS = 30.0

Connect = Callable[..., httpx.Client]


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with StubServer(api_keys=[KEY, OTHER_KEY], models=[MODEL, scripted_model()]) as opened:
        yield opened


@pytest.fixture
def connect(server: StubServer) -> Iterator[Connect]:
    """Make HTTP clients that close with the test."""
    with ExitStack() as stack:

        def make(key: str | None = KEY, **options: Any) -> httpx.Client:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return stack.enter_context(
                httpx.Client(
                    base_url=server.url, headers=headers, timeout=TIMEOUT_SECONDS, **options
                )
            )

        yield make


@pytest.fixture
def client(connect: Connect) -> httpx.Client:
    return connect()


def chat_body(*texts: str, **fields: Any) -> dict[str, Any]:
    """A chat request whose answers are these texts."""
    messages = [{"role": "user", "content": say(*texts)}]
    return {"model": SCRIPTED, "messages": messages, "n": len(texts), **fields}


def complete(client: httpx.Client, path: str, body: dict[str, Any], **options: Any) -> Any:
    """The JSON of a successful response."""
    reply = client.post(path, json=body, **options)
    assert reply.status_code == 200, reply.text
    return reply.json()


def read_events(content: str) -> list[dict[str, Any]]:
    """The events of a stream of OpenAI's API, without the last one, which says that it ended."""
    *events, done, rest = content.split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), content[-300:]
    return [json.loads(event.removeprefix("data: ")) for event in events if event[0] != ":"]
