"""Answers that follow a JSON schema, through the endpoints of both families."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.integration.server.inference.conftest import complete, read_events
from tinkex.testing import SCRIPTED

CHAT = "/v1/chat/completions"
ANIMAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"enum": [2, 4]}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


def asked(response_format: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Name an animal."}]
    body = {"model": SCRIPTED, "messages": messages, "max_tokens": 60, "seed": 1, **fields}
    return body | {"response_format": response_format}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}


def check_animal(content: str) -> None:
    animal = json.loads(content)
    assert animal.keys() == {"kind", "legs"}
    assert animal["kind"] in {"cat", "dog"} and animal["legs"] in {2, 4}


def test_answer_follows_the_schema(client: httpx.Client) -> None:
    answer = complete(client, CHAT, asked(schema_format(ANIMAL), n=3))
    for choice in answer["choices"]:
        check_animal(choice["message"]["content"])
        assert choice["finish_reason"] == "stop"


def test_streamed_answer_is_the_same(client: httpx.Client) -> None:
    body = asked(schema_format(ANIMAL))
    whole = complete(client, CHAT, body)["choices"][0]["message"]["content"]
    reply = client.post(CHAT, json=body | {"stream": True})
    events = read_events(reply.text)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole
    check_animal(whole)


def test_json_object_is_an_object(client: httpx.Client) -> None:
    [choice] = complete(client, CHAT, asked({"type": "json_object"}))["choices"]
    content = choice["message"]["content"]
    assert content.startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(content), dict)


def test_messages_api_follows_the_schema(client: httpx.Client) -> None:
    body = asked(None)
    del body["response_format"], body["seed"]
    body["output_config"] = {"format": {"type": "json_schema", "schema": ANIMAL}}
    answer = complete(client, "/v1/messages", body)
    check_animal("".join(block["text"] for block in answer["content"]))


@pytest.mark.parametrize(
    ("response_format", "reason"),
    [
        ({"type": "nonsense"}, "'nonsense' is not supported"),
        ({"type": "json_schema"}, "must be a JSON schema"),
        (schema_format({"type": "nonsense"}), "cannot be used: Invalid type: nonsense"),
        (schema_format({"enum": ["x" * 70_000]}), "expected at most 65536"),
    ],
)
def test_unusable_format_is_refused(
    client: httpx.Client, response_format: Any, reason: str
) -> None:
    reply = client.post(CHAT, json=asked(response_format))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "response_format")
    assert reason in error["message"]
