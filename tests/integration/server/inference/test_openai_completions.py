"""Completions: prompts, echo and log-probabilities, whole and streamed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.server.inference.conftest import MODEL, complete, read_events
from tinkex import text
from tinkex.models import TINY_FOLDER
from tinkex.testing import SCRIPTED, say

COMPLETIONS = "/v1/completions"


def body(*answers: str, **fields: Any) -> dict[str, Any]:
    return {"model": SCRIPTED, "prompt": say(*answers), "max_tokens": 100, **fields}


def test_answer(client: httpx.Client) -> None:
    answer = complete(client, COMPLETIONS, body("Hello."))
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "Hello.",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }


def test_default_max_tokens(client: httpx.Client) -> None:
    request = {"model": SCRIPTED, "prompt": say("x " * 100)}
    answer = complete(client, COMPLETIONS, request)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_prompts_in_order(client: httpx.Client) -> None:
    prompts = [say("a", "b"), say("c", "d"), say("e", "f")]
    request = {"model": SCRIPTED, "prompt": prompts, "max_tokens": 9, "n": 2}
    answer = complete(client, COMPLETIONS, request)
    found = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert found == list(enumerate("abcdef"))
    one = complete(client, COMPLETIONS, request | {"prompt": prompts[0]})
    three = complete(client, COMPLETIONS, request | {"prompt": [prompts[0]] * 3})
    assert three["usage"]["prompt_tokens"] == 3 * one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]


def test_token_prompts(client: httpx.Client) -> None:
    tokenizer = text.load_tokenizer(str(TINY_FOLDER))
    tokens = text.encode(tokenizer, say("yes"))
    for prompt, expected in ((tokens, ["yes"]), ([tokens, tokens], ["yes", "yes"])):
        answer = complete(client, COMPLETIONS, body() | {"prompt": prompt})
        assert [choice["text"] for choice in answer["choices"]] == expected


def test_echo_with_logprobs(client: httpx.Client) -> None:
    """What lm-eval's local-completions reads: prompt tokens first, the first without a score."""
    tokenizer = text.load_tokenizer(str(TINY_FOLDER))
    tokens = text.encode(tokenizer, "The cat sat on the mat.", add_special_tokens=False)
    request = {"model": SCRIPTED, "prompt": tokens, "max_tokens": 1, "temperature": 0, "seed": 1234}
    request |= {"echo": True, "logprobs": 2, "return_token_ids": True}
    answer = complete(client, COMPLETIONS, request)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(tokens) + 1 == len(choice["token_ids"])
    assert choice["token_ids"][:-1] == tokens == choice["prompt_token_ids"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert choice["text"].startswith("The cat sat on the mat.")
    assert "".join(logprobs["tokens"][: len(tokens)]) == "The cat sat on the mat."
    offsets = logprobs["text_offset"]
    for name, offset in zip(logprobs["tokens"][:-1], offsets[:-1], strict=True):
        assert choice["text"][offset:].startswith(name)
    names = ("tokens", "token_logprobs", "top_logprobs")
    scored = zip(*(logprobs[name] for name in names), strict=True)
    for name, score, top in list(scored)[1:]:
        assert top[name] == score
        assert 2 <= len(top) <= 3
    # Greedy: the sampled token is the most likely one.
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())


def test_echo_without_sampling(client: httpx.Client) -> None:
    request = {"model": MODEL, "prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = complete(client, COMPLETIONS, request | {"add_special_tokens": False})
    (choice,) = answer["choices"]
    assert choice["text"] == "hello"
    assert choice["logprobs"]["tokens"] == list("hello")
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    scores = choice["logprobs"]["token_logprobs"]
    assert [set(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [{c} for c in "ello"]
    assert scores[0] is None and all(score < 0 for score in scores[1:])
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"logprobs": 3, "stop": "la", "n": 2},
        {"prompt": [say("one"), say("two words"), say("three")], "return_token_ids": True},
    ],
)
def test_stream_equals_answer(client: httpx.Client, fields: dict[str, Any]) -> None:
    request = body("Voil\u00e0 \U0001f600 la fin", **fields)
    whole = complete(client, COMPLETIONS, request)
    streamed = request | {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = read_events(client.post(COMPLETIONS, json=streamed).text)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(event["usage"] is None for event in events)
    for choice in whole["choices"]:
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"] is not None:
            scored = [part["logprobs"] for part in parts if part["logprobs"]]
            joined = {name: [x for each in scored for x in each[name]] for name in scored[0]}
            assert joined == choice["logprobs"]
        if "token_ids" in choice:
            assert [id for part in parts for id in part["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 513}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 129}, "n"),
        ({"n": 128, "prompt": [[1] * 200] * 16, "echo": True, "logprobs": 20}, "n"),
        ({"n": 128, "prompt": [[1] * 2000] * 16, "return_token_ids": True}, "n"),
    ],
)
def test_refused_fields(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    reply = client.post(COMPLETIONS, json=body("x", **fields))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
