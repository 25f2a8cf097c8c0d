"""Tool calls and reasoning over HTTP, for scripted models of all families."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.chat_templates import TEMPLATES, save_family
from tinkex.engine.fake.scripted import say, scripted_model
from tinkex.testing import StubServer

KEY = "tml-alice"
ARGUMENTS = {"zone": "UTC", "days": 2}
TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
_OBJECT = '{"name": "now", "arguments": {"zone": "UTC", "days": 2}}'
CALLS = {
    "hermes": f"<tool_call>\n{_OBJECT}\n</tool_call>",
    "qwen-xml": "<tool_call>\n<function=now>\n<parameter=zone>\nUTC\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama3": _OBJECT.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{_OBJECT}]",
    "described": f"<tool_call>\n{_OBJECT}\n</tool_call>",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    """A server with a model of each family, one of them with a parser set by the operator."""
    root = tmp_path_factory.mktemp("families")
    models = [scripted_model(save_family(root / name, name), name) for name in TEMPLATES]
    models.append(scripted_model(root / "plain", "described"))
    stub = StubServer(api_keys=[KEY], models=models)
    stub._config = dataclasses.replace(stub._config, tool_parsers={"described": "hermes"})
    with stub as opened:
        yield opened


@pytest.fixture(scope="module")
def client(server: StubServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30.0) as opened:
        yield opened


def chat(client: httpx.Client, model: str, text: str, **options: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **options}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def stream(client: httpx.Client, model: str, text: str, **options: Any) -> dict[str, Any]:
    """The choice of a streamed answer, its deltas joined."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], **options}
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    for line in lines:
        choice = json.loads(line[6:])["choices"][0]
        finish = choice["finish_reason"] or finish
        add_delta(message, choice["delta"])
    return {"message": message, "finish_reason": finish}


def add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        message[name] += delta.get(name) or ""
    for call in delta.get("tool_calls", []):
        if call["index"] == len(message["tool_calls"]):
            message["tool_calls"].append({**call["function"], "id": call["id"]})
        else:
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]


def calls_of(message: dict[str, Any]) -> list[tuple[str, object]]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("family", CALLS)
def test_calls_are_parsed_and_streamed(client: httpx.Client, family: str) -> None:
    text = "" if family == "llama3" else "One moment."
    script = say(text + CALLS[family])
    whole = chat(client, family, script, tools=[TOOL])
    assert calls_of(whole["message"]) == [("now", ARGUMENTS)]
    assert whole["message"]["content"] == (text or None)
    assert whole["finish_reason"] == "tool_calls"
    (call,) = whole["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    streamed = stream(client, family, script, tools=[TOOL])
    assert calls_of(streamed["message"]) == [("now", ARGUMENTS)]
    assert streamed["message"]["tool_calls"][0]["arguments"] == call["function"]["arguments"]
    assert streamed["message"]["content"] == text
    assert streamed["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("family", CALLS)
def test_results_of_calls_continue_the_conversation(client: httpx.Client, family: str) -> None:
    call = {"name": "now", "arguments": json.dumps(ARGUMENTS)}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": say("It is noon.")},
    ]
    body = {"model": family, "messages": messages, "tools": [TOOL]}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["message"]["content"] == "It is noon." and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("family", CALLS)
def test_named_function_is_called(client: httpx.Client, family: str) -> None:
    """The model only writes the arguments, because the prompt contains the beginning."""
    ends = {"qwen-xml": "</function>\n</tool_call>", "mistral": "}]", "llama3": "}"}
    arguments = json.dumps(ARGUMENTS)
    if family == "qwen-xml":
        arguments = CALLS[family].split("<function=now>\n")[1].split("</function>")[0]
    script = say(arguments + ends.get(family, "}\n</tool_call>"))
    choice = {"type": "function", "function": {"name": "now"}}
    answer = chat(client, family, script, tools=[TOOL], tool_choice=choice)
    assert calls_of(answer["message"]) == [("now", ARGUMENTS)]


@pytest.mark.parametrize("family", CALLS)
def test_only_one_call_if_parallel_calls_are_off(client: httpx.Client, family: str) -> None:
    separator = "; " if family == "llama3" else "\n"
    script = say(f"{CALLS[family]}{separator}{CALLS[family]}")
    both = chat(client, family, script, tools=[TOOL])
    assert len(calls_of(both["message"])) == 2
    one = chat(client, family, script, tools=[TOOL], parallel_tool_calls=False)
    assert calls_of(one["message"]) == [("now", ARGUMENTS)]
    assert one["finish_reason"] == "tool_calls" and one["message"]["content"] is None


def test_calls_are_text_without_tools(client: httpx.Client) -> None:
    script = say(CALLS["hermes"])
    assert chat(client, "hermes", script)["message"]["content"] == CALLS["hermes"]
    refused = chat(client, "hermes", script, tools=[TOOL], tool_choice="none")
    assert refused["message"]["content"] == CALLS["hermes"]
    assert refused["finish_reason"] == "stop"


def test_calls_of_unknown_functions_are_text(client: httpx.Client) -> None:
    text = CALLS["hermes"].replace("now", "then")
    answer = chat(client, "hermes", say(text), tools=[TOOL])
    assert answer["message"]["content"] == text and answer["finish_reason"] == "stop"


def test_tools_of_a_plain_template_are_refused(client: httpx.Client) -> None:
    body = {"model": "plain", "messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_value")
    assert "chat template has no tools" in error["message"]


def test_error_of_a_template_is_a_bad_request(client: httpx.Client) -> None:
    body = {"model": "mistral", "messages": [{"role": "system", "content": "a"}]}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith(
        "refused the messages: Only user, tool and assistant roles are supported!"
    )


def test_template_cannot_be_replaced(client: httpx.Client) -> None:
    body = {"model": "hermes", "messages": [{"role": "user", "content": "a"}]}
    kwargs = {"chat_template": "{{ range(100000) | list }}"}
    response = client.post("/v1/chat/completions", json={**body, "chat_template_kwargs": kwargs})
    assert response.status_code == 400 and "chat_template" in response.text


def test_reasoning_is_separated(client: httpx.Client) -> None:
    script = say("<think>\nHm \U0001f600\n</think>\n\nNoon.")
    for ask in (chat, stream):
        message = ask(client, "hermes", script)["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm \U0001f600", "Noon.")
    together = chat(client, "hermes", script, separate_reasoning=False)
    assert together["message"]["content"] == "<think>\nHm \U0001f600\n</think>\n\nNoon."


def test_reasoning_that_the_prompt_opens(client: httpx.Client) -> None:
    options: dict[str, Any] = {"chat_template_kwargs": {"opens_reasoning": True}}
    message = chat(client, "hermes", say("Hm.\n</think>\n\nNoon."), **options)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Noon.")
    cut = chat(client, "hermes", say("Hm hm hm"), max_tokens=2, **options)
    assert cut["finish_reason"] == "length" and cut["message"]["reasoning_content"]
    assert not cut["message"]["content"]


def test_reasoning_tokens_are_counted(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": say("<think>Hm.</think>Noon.")}]
    body = {"model": "hermes", "messages": messages}
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 3 <= counted < usage["completion_tokens"]


@pytest.mark.parametrize("family", CALLS)
def test_messages_api_has_tool_use_blocks(client: httpx.Client, family: str) -> None:
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    body = {
        "model": family,
        "max_tokens": 500,
        "messages": [{"role": "user", "content": say(CALLS[family])}],
        "tools": [{"name": "now", "description": "The time.", "input_schema": schema}],
    }
    response = client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    (block,) = answer["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "now", ARGUMENTS)
    assert answer["stop_reason"] == "tool_use"
