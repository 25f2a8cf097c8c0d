"""Chat completions, completions and models, without streams."""

from __future__ import annotations

import httpx
import pytest

from tests.integration.server.inference.conftest import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


@pytest.mark.parametrize("base", ["/v1", "/oai/api/v1"])
def test_chat(client: httpx.Client, base: str) -> None:
    reply = client.post(f"{base}/chat/completions", json=CHAT)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["id"] == f"chatcmpl-{reply.headers['x-request-id']}"
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] in {"stop", "length"}
    assert body["usage"]["completion_tokens"] <= 8


def test_completions(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": ["hello", "you"], "max_tokens": 4, "n": 2, "seed": 1}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1, 2, 3]


def test_models(client: httpx.Client) -> None:
    (entry,) = client.get("/v1/models").json()["data"]
    assert entry["id"] == MODEL
    assert client.get(f"/v1/models/{MODEL}").json() == entry
