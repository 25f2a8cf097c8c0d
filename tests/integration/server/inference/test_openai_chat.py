"""Chat completions, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.integration.server.inference.conftest import (
    MODEL,
    chat_body,
    complete,
    read_events,
)
from tinkex.testing import SCRIPTED, say

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("base", ["/v1", "/oai/api/v1"])
def test_answer(client: httpx.Client, base: str) -> None:
    reply = client.post(f"{base}/chat/completions", json=chat_body("Hello there."))
    assert reply.status_code == 200, reply.text
    body = reply.json()
    request_id = reply.headers["x-request-id"]
    assert body["created"] > 1_700_000_000
    assert body["system_fingerprint"].startswith("tinkex-")
    num_prompt, num_answer = (body["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion"))
    assert num_prompt > 5 and num_answer > 2
    assert body == {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": body["created"],
        "model": SCRIPTED,
        "system_fingerprint": body["system_fingerprint"],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_model_without_template(client: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    answer = complete(client, CHAT, body | {"return_token_ids": True})
    assert bytes(answer["prompt_token_ids"]).startswith(b"User: hi")
    assert answer["usage"]["completion_tokens"] <= 5


def test_choices_and_seed(client: httpx.Client) -> None:
    body = chat_body("one", "two", "three")
    answer = complete(client, CHAT, body)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["one", "two", "three"]
    sampled = {"model": MODEL, "messages": body["messages"], "max_tokens": 20, "seed": 3}
    sampled |= {"return_token_ids": True}
    one, two = (complete(client, CHAT, sampled)["choices"] for _ in range(2))
    assert one == two
    assert one != complete(client, CHAT, sampled | {"seed": 4})["choices"]


def test_finish_reasons(client: httpx.Client) -> None:
    def finish(**fields: Any) -> tuple[str, str, object]:
        (choice,) = complete(client, CHAT, chat_body("alpha beta gamma", **fields))["choices"]
        return choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]

    assert finish() == ("alpha beta gamma", "stop", None)
    assert finish(stop="beta") == ("alpha ", "stop", "beta")
    assert finish(stop=["nothing", "a g"]) == ("alpha bet", "stop", "a g")
    text, reason, stop = finish(max_completion_tokens=2, max_tokens=100)
    assert (reason, stop) == ("length", None)
    assert "alpha beta gamma".startswith(text)
    token = complete(client, CHAT, chat_body("alpha", return_token_ids=True))["choices"][0]
    first = token["token_ids"][0]
    assert finish(stop_token_ids=[first])[1:] == ("stop", first)
    text, reason, _ = finish(ignore_eos=True, max_tokens=100)
    assert (text[:16], reason) == ("alpha beta gamma", "length")


def test_max_tokens_is_cut_to_the_context(client: httpx.Client) -> None:
    assert complete(client, CHAT, chat_body("hi", max_tokens=10**9))["choices"]


def test_logprobs(client: httpx.Client) -> None:
    answer = complete(client, CHAT, chat_body("h\u00e9 \U0001f600", logprobs=True, top_logprobs=3))
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    said = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert said.decode() == "h\u00e9 \U0001f600"
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] <= 0
        same = [top for top in entry["top_logprobs"] if top["bytes"] == entry["bytes"]]
        assert all(top["logprob"] == entry["logprob"] for top in same)
    by_id = complete(client, CHAT, chat_body("hi", logprobs=True, return_tokens_as_token_ids=True))[
        "choices"
    ][0]["logprobs"]["content"]
    assert all(entry["token"].startswith("token_id:") for entry in by_id)


# --- streams ---------------------------------------------------------------------------------
def test_stream_bytes(client: httpx.Client) -> None:
    """The exact bytes of a stream."""
    body = chat_body("Hello", stream=True, stream_options={"include_usage": True})
    reply = client.post(CHAT, json=body)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    request_id = reply.headers["x-request-id"]
    first = json.loads(reply.text.partition("\n\n")[0].removeprefix("data: "))
    head = (
        f'data: {{"id":"chatcmpl-{request_id}","object":"chat.completion.chunk",'
        f'"created":{first["created"]},"model":"{SCRIPTED}",'
        f'"system_fingerprint":"{first["system_fingerprint"]}","choices":['
    )
    usage = read_events(reply.text)[-1]["usage"]
    encoded_usage = json.dumps(usage, separators=(",", ":"))
    start = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null'
    end = '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}'
    texts = [event["choices"][0]["delta"]["content"] for event in read_events(reply.text)[1:-2]]
    assert "".join(texts) == "Hello"
    middle = "".join(
        f'{head}{{"index":0,"delta":{{"content":"{text}"}},"logprobs":null,"finish_reason":null}}]'
        ',"usage":null}\n\n'
        for text in texts
    )
    assert reply.text == (
        f'{head}{start},"finish_reason":null}}],"usage":null}}\n\n'
        f"{middle}"
        f'{head}{end}],"usage":null}}\n\n'
        f'{head}],"usage":{encoded_usage}}}\n\n'
        "data: [DONE]\n\n"
    )
    assert usage["completion_tokens"] > 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["la"], "logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True, "max_tokens": 3},
    ],
)
def test_stream_equals_answer(client: httpx.Client, fields: dict[str, Any]) -> None:
    body = chat_body("Voil\u00e0 \U0001f600 la fin", "two", "", **fields)
    whole = complete(client, CHAT, body)
    reply = client.post(
        CHAT, json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    *events, last = read_events(reply.text)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        deltas = [part["delta"] for part in parts]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        scores = [entry for p in parts if p["logprobs"] for entry in p["logprobs"]["content"]]
        assert scores == (choice["logprobs"] or {"content": []})["content"]
        if "token_ids" in choice:
            assert [id for part in parts for id in part["token_ids"]] == choice["token_ids"]


def test_stream_error_before_the_start_has_a_status(client: httpx.Client) -> None:
    reply = client.post(CHAT, json=chat_body("hi", stream=True, temperature=9))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "temperature"


def test_roles_and_parts(client: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "7"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": say("done"), "name": "bob"},
    ]
    answer = complete(client, CHAT, {"model": SCRIPTED, "messages": messages})
    assert answer["choices"][0]["message"]["content"] == "done"


def test_metrics(client: httpx.Client) -> None:
    def count(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    requests = (
        'tinkex_inference_requests_total{endpoint="chat_completions",family="openai",status="200"}'
    )
    streams = 'tinkex_inference_first_token_seconds_count{family="openai"}'
    before = count(requests), count(streams)
    client.post(CHAT, json=chat_body("hi", stream=True))
    assert (count(requests), count(streams)) == (before[0] + 1, before[1] + 1)
