"""Errors of the inference endpoints: status, body of the family, headers; and hostile requests."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.integration.server.inference.conftest import (
    KEY,
    MODEL,
    OTHER_KEY,
    Connect,
    chat_body,
    complete,
)
from tinkex.testing import StubServer

CHAT = "/v1/chat/completions"


def check_error(
    reply: httpx.Response, status: int, code: str | None, param: str | None = None
) -> str:
    """Check an error of OpenAI's family and return its message."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    (error,) = reply.json().values()
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == (kind, code, param), error
    assert "/tmp" not in error["message"]
    message: str = error["message"]
    assert message
    return message


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/v1", "/v1/", "/oai/api/v1/embeddings", "/oai/api", "/v1/chat"]
)
def test_unknown_paths(client: httpx.Client, path: str) -> None:
    check_error(client.get(path), 404, "model_not_found")


@pytest.mark.parametrize("path", ["/anthropic/api", "/anthropic/api/v1/x", "/v1/messages/batches"])
def test_unknown_paths_of_anthropic(client: httpx.Client, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 404
    body = reply.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    assert body["request_id"] == reply.headers["request-id"]


def test_methods(client: httpx.Client) -> None:
    reply = client.get(CHAT)
    check_error(reply, 405, None)
    assert reply.headers["allow"] == "OPTIONS, POST"
    assert client.options(CHAT).status_code == 204
    assert client.options(CHAT).headers["allow"] == "OPTIONS, POST"
    head = client.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")


def test_keys(server: StubServer, connect: Connect) -> None:
    body = chat_body("hi")
    for key in (None, "tml-wrong", "rubbish", "x" * 5000):
        reply = connect(key).post(CHAT, json=body)
        check_error(reply, 401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    nobody = connect(None)
    assert nobody.post(CHAT, json=body, headers={"x-api-key": KEY}).status_code == 200
    both = {"x-api-key": KEY, "authorization": f"Bearer {KEY}"}
    assert nobody.post(CHAT, json=body, headers=both).status_code == 200
    reply = nobody.post("/v1/messages", json={})
    assert reply.status_code == 401
    assert reply.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": 2.5}, None, "temperature"),
        ({"temperature": -1}, None, "temperature"),
        ({"temperature": "hot"}, None, "temperature"),
        ({"top_p": 0}, None, "top_p"),
        ({"top_k": -2}, None, "top_k"),
        ({"n": 0}, None, "n"),
        ({"n": 10**6}, None, "n"),
        ({"n": 1.5}, None, "n"),
        ({"max_tokens": 0}, None, "max_tokens"),
        ({"max_completion_tokens": -5}, None, "max_completion_tokens"),
        ({"seed": 2**70}, None, "seed"),
        ({"stop": [""]}, None, "stop"),
        ({"stop": ["x"] * 17}, None, "stop"),
        ({"stop": "x" * 1001}, None, "stop"),
        ({"stop_token_ids": [-1]}, None, "stop_token_ids"),
        (
            {"ignore_eos": True, "response_format": {"type": "json_object"}},
            None,
            "ignore_eos",
        ),
        ({"top_logprobs": 3}, None, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, None, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options"),
        ({"messages": []}, None, "messages"),
        ({"messages": user("x") * 4097}, None, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, None, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, None, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, None, "messages[0].content"),
        ({"messages": "hello"}, None, "messages"),
        ({"messages": [1]}, None, "messages[0]"),
        ({"tool_choice": "sometimes"}, None, "tool_choice"),
        ({"tool_choice": "required"}, None, "tool_choice"),
        ({"tool_choice": {"function": {"name": "f"}}}, None, "tool_choice"),
        ({"tools": [{"type": "function"}]}, None, "tools[0]"),
        ({"presence_penalty": 0.5}, "unsupported_value", "presence_penalty"),
        ({"frequency_penalty": -1}, "unsupported_value", "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "unsupported_value", "repetition_penalty"),
        ({"min_p": 0.1}, "unsupported_value", "min_p"),
        ({"logit_bias": {"5": 100}}, "unsupported_value", "logit_bias"),
        ({"modalities": ["text", "audio"]}, "unsupported_value", "modalities"),
        ({"audio": {"voice": "x"}}, "unsupported_value", "audio"),
        ({"prediction": {"type": "content"}}, "unsupported_value", "prediction"),
        ({"web_search_options": {}}, "unsupported_value", "web_search_options"),
        ({"reasoning_effort": "huge"}, None, "reasoning_effort"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            None,
            "continue_final_message",
        ),
    ],
)
def test_refused_fields(
    client: httpx.Client, fields: dict[str, Any], code: str | None, param: str
) -> None:
    reply = client.post(CHAT, json=chat_body("hi") | fields)
    check_error(reply, 400, code, param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", None])
def test_parts_that_no_model_takes(client: httpx.Client, kind: str | None) -> None:
    messages = [{"role": "user", "content": [{"type": kind, kind or "x": {"url": "data:"}}]}]
    reply = client.post(CHAT, json={"model": MODEL, "messages": messages})
    check_error(reply, 400, "unsupported_value", "messages[0].content[0]")


def test_neutral_and_unknown_fields_are_accepted(client: httpx.Client) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "min_p": 0,
        "logit_bias": {},
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "store": True,
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "verbosity": "low",
        "prompt_cache_key": "k",
        "user": "u" * 1000,
        "safety_identifier": "s",
        "top_k": -1,
        "tools": [],
        "tool_choice": None,
        "functions": None,
        "seed": None,
        "stop": None,
        "n": 1,
        "stream": False,
        "parallel_tool_calls": True,
        "something_new": {"x": [1]},
    }
    answer = complete(client, CHAT, chat_body("ok", **(neutral | {"n": 1})))
    assert answer["choices"][0]["message"]["content"] == "ok"


def test_prompt_too_long(client: httpx.Client) -> None:
    limit = client.get(f"/v1/models/{MODEL}").json()["max_model_len"]
    for length in (limit + 10, limit * 300):
        reply = client.post(CHAT, json={"model": MODEL, "messages": user("x" * length)})
        message = check_error(reply, 400, "context_length_exceeded", "messages")
        assert f"maximum context length is {limit} tokens" in message
    for prompt in ([1] * limit, "x" * limit * 300):
        reply = client.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
        check_error(reply, 400, "context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": 5}',
        b"\xff\xfe",
        b'{"model": "a\\u0000b", "messages": []}',
        b'{"model": "tinkex/bigram", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "tinkex/bigram", "metadata": '
        + b'{"a":' * 50_000
        + b"1"
        + b"}" * 50_000
        + b"}",
    ],
)
def test_unreadable_bodies(client: httpx.Client, content: bytes) -> None:
    reply = client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_large_bodies(client: httpx.Client) -> None:
    body = json.dumps(chat_body("hi") | {"metadata": {"x": "y" * (16 << 20)}}).encode()
    check_error(client.post(CHAT, content=body), 413, "request_too_large")
    fits = json.dumps(chat_body("hi") | {"metadata": {"x": "y" * (4 << 20)}}).encode()
    assert client.post(CHAT, content=fits).status_code == 200


def test_ten_thousand_messages(client: httpx.Client) -> None:
    reply = client.post(CHAT, json={"model": MODEL, "messages": user("hi") * 10_000})
    assert "10000 messages" in check_error(reply, 400, None, "messages")


def test_engine_failures_keep_their_category(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json={"model": MODEL, "prompt": [2**31 - 1]})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_idempotency_key(client: httpx.Client, connect: Connect) -> None:
    body = {"model": MODEL, "messages": user("hi"), "max_tokens": 30, "return_token_ids": True}
    headers = {"idempotency-key": "once"}
    one, two = (complete(client, CHAT, body, headers=headers) for _ in range(2))
    assert one["id"] == two["id"]
    assert one["choices"] == two["choices"]
    other = complete(connect(OTHER_KEY), CHAT, body, headers=headers)
    assert other["id"] != one["id"]


def test_idempotency_key_of_another_request(client: httpx.Client) -> None:
    headers = {"idempotency-key": "twice"}
    for texts in (["a"], ["b", "c"], ["a"]):
        answer = complete(client, CHAT, chat_body(*texts), headers=headers)
        assert [each["message"]["content"] for each in answer["choices"]] == texts
    scored = {"model": MODEL, "echo": True, "logprobs": 1, "max_tokens": 1}
    for prompt in ([1, 2], [3, 4, 5]):
        answer = complete(client, "/v1/completions", scored | {"prompt": prompt}, headers=headers)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(prompt) + 1


def test_user_is_in_the_audit_log(client: httpx.Client) -> None:
    complete(client, CHAT, chat_body("hi", user="end-user-7"))
    entries = client.get("/api/v1/audit").json()["entries"]
    found = [one for one in entries if one["event"] == "inference_request"]
    assert any("end-user-7" in json.dumps(entry) for entry in found)


def test_usage_is_counted(connect: Connect) -> None:
    """What is billed is what the response says."""
    bob = connect(OTHER_KEY)

    def billed() -> int:
        quotas = bob.get("/api/v1/usage/quotas").json()["quotas"]
        return next(int(row["used"]) for row in quotas if row["name"] == "tokens_per_hour")

    before = billed()
    usage = complete(bob, CHAT, chat_body("four words are said"))["usage"]
    assert billed() - before == usage["total_tokens"]


# --- tokenizers ------------------------------------------------------------------------------
def test_tokenize(client: httpx.Client) -> None:
    model = "tinkex/scripted"
    found = complete(
        client, "/tokenize", {"model": model, "prompt": "Hello you", "return_token_strs": True}
    )
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    body = {"model": model, "tokens": found["tokens"]}
    assert complete(client, "/detokenize", body) == {"prompt": "Hello you"}
    chat = complete(client, "/tokenize", {"model": model, "messages": user("hi")})
    rendered = complete(client, "/detokenize", {"model": model, "tokens": chat["tokens"]})["prompt"]
    assert "hi" in rendered and rendered.count("<|im_start|>") == 2
    info = client.get(f"/tokenizer_info?model={model}").json()
    # lm-eval derives the addresses from that of the completions.
    assert client.get(f"/oai/api/tokenizer_info?model={model}").json() == info
    assert info["eos_token"] == "<|im_end|>"
    assert "im_start" in info["chat_template"]
    check_error(client.post("/tokenize", json={"prompt": "x"}), 400, None, "model")
    check_error(client.post("/tokenize", json={"model": model}), 400, None, "prompt")
    for tokens in ([-1], [10**9]):
        reply = client.post("/detokenize", json={"model": model, "tokens": tokens})
        check_error(reply, 400, None, "tokens")
    check_error(
        client.post("/tokenize", json={"model": "nothing", "prompt": "x"}),
        404,
        "model_not_found",
        "model",
    )
