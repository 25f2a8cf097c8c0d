"""Conversations as prompts of model families, and parsers of their answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import collect
from tests.support.chat_templates import TEMPLATES, save_family
from tinkex.errors import InvalidInput
from tinkex.models import TINY_FOLDER
from tinkex.server.inference.chat_format import ChatFormat
from tinkex.server.inference.chat_request import ChatRequest
from tinkex.testing import ToyTokenizer
from tinkex.text import load_tokenizer, render_chat

USER = {"role": "user", "content": "What time is it?"}
ASSISTANT = {"role": "assistant", "content": "It is noon."}
TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_0123456789abcdefghijklmn",
            "type": "function",
            "function": {"name": "now", "arguments": {"zone": "UTC"}},
        }
    ],
}
RESULT = {"role": "tool", "content": '"noon"', "tool_call_id": "call_0123456789abcdefghijklmn"}
#: How each family writes a call with the arguments {"zone": "UTC"}.
CALLS = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>',
    "qwen-xml": "<tool_call>\n<function=now>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n"
    "</tool_call>",
    "llama3": '{"name": "now", "parameters": {"zone": "UTC"}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {"zone": "UTC"}}]',
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ChatFormat]:
    """Make the chat format of a family's template."""
    folders: dict[str, Path] = {}

    def make(family: str, tool_parser: str | None = None) -> ChatFormat:
        if family not in folders:
            folders[family] = save_family(tmp_path_factory.mktemp(family), family)
        return ChatFormat("a/model", load_tokenizer(str(folders[family])), tool_parser)

    return make


@pytest.fixture(scope="module")
def tiny() -> ChatFormat:
    return ChatFormat("tinkex/tiny", load_tokenizer(str(TINY_FOLDER)))


def request(*messages: object, **options: Any) -> ChatRequest:
    return ChatRequest(model="a/model", messages=messages, **options)  # type: ignore[arg-type]


def text_of(chat: ChatFormat, asked: ChatRequest) -> str:
    return chat.tokenizer.decode(chat.render(asked).tokens)


def test_prompt_equals_that_of_the_tokenizer(tiny: ChatFormat) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER, ASSISTANT, USER]
    assert tiny.render(request(*messages)).tokens == render_chat(tiny.tokenizer, messages)
    ended = tiny.render(request(*messages, has_generation_prompt=False)).tokens
    assert ended == render_chat(tiny.tokenizer, messages, add_generation_prompt=False)


@pytest.mark.parametrize("family", CALLS)
def test_family_is_detected_from_the_template(load: Callable[..., ChatFormat], family: str) -> None:
    found = load(family).family
    assert found is not None and found.name == family
    assert load("plain").family is None
    assert load("plain", "hermes").family is not None


@pytest.mark.parametrize("family", CALLS)
def test_tools_calls_and_results_are_rendered(load: Callable[..., ChatFormat], family: str) -> None:
    chat = load(family)
    text = text_of(chat, request(USER, CALLED, RESULT, USER, tools=[TOOL]))
    assert "now" in text and "noon" in text and "UTC" in text
    without = text_of(chat, request(USER, tools=[TOOL], tool_choice="none"))
    assert without == text_of(chat, request(USER)) and "now" not in without


@pytest.mark.parametrize("family", CALLS)
def test_answers_of_families_are_parsed(load: Callable[..., ChatFormat], family: str) -> None:
    chat = load(family)
    asked = request(USER, tools=[TOOL])
    parser = chat.new_parser(asked, chat.render(asked))
    tokens = chat.tokenizer.encode(CALLS[family], add_special_tokens=False)
    events = [event for token in tokens for event in parser.feed([token])]
    answer = collect([*events, *parser.finish()])
    assert answer.calls == [("now", '{"zone": "UTC"}')] and answer.ended == [0]
    assert answer.text == "" and parser.has_tool_calls


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("name", ["now", None])
def test_forced_calls_begin_in_the_prompt(
    load: Callable[..., ChatFormat], family: str, name: str | None
) -> None:
    chat = load(family)
    choice: Any = "auto" if name else "required"
    asked = request(USER, tools=[TOOL], forced_tool=name, tool_choice=choice)
    rendered = chat.render(asked)
    assert chat.tokenizer.decode(rendered.tokens).endswith(rendered.forced_text)
    assert (name is None) == ("now" not in rendered.forced_text)
    rest = CALLS[family].removeprefix(rendered.forced_text)
    assert rest != CALLS[family]
    parser = chat.new_parser(asked, rendered)
    tokens = chat.tokenizer.encode(rest, add_special_tokens=False)
    answer = collect([*parser.feed(tokens), *parser.finish()])
    assert answer.calls == [("now", '{"zone": "UTC"}')] and answer.text == ""


def test_tools_are_refused_without_a_family(load: Callable[..., ChatFormat]) -> None:
    with pytest.raises(InvalidInput, match="chat template has no tools; leave tools out"):
        load("plain").render(request(USER, tools=[TOOL]))
    with pytest.raises(InvalidInput, match="chat template does not exist"):
        ChatFormat("a/model", ToyTokenizer()).render(request(USER, tools=[TOOL]))


def test_configured_parser_describes_tools_in_the_system_message(
    load: Callable[..., ChatFormat],
) -> None:
    chat = load("plain", "hermes")
    system = {"role": "system", "content": "Be brief."}
    text = text_of(chat, request(system, USER, CALLED, RESULT, USER, tools=[TOOL]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert '"description": "The time."' in text
    assert CALLS["hermes"] in text and '<tool_response>\n"noon"\n</tool_response>' in text
    assert text_of(chat, request(USER, tools=[TOOL])).startswith("<|im_start|>system\nYou may")


def test_mistral_gets_short_call_ids(load: Callable[..., ChatFormat]) -> None:
    text = text_of(load("mistral"), request(USER, CALLED, RESULT, tools=[TOOL]))
    short = text.split('"id": "')[1][:9]
    assert short.isalnum() and f'"call_id": "{short}"' in text


def test_errors_of_templates_name_the_model(load: Callable[..., ChatFormat]) -> None:
    system = {"role": "system", "content": "x"}
    with pytest.raises(InvalidInput) as failed:
        load("mistral").render(request(system))
    assert failed.value.message == (
        "The chat template of 'a/model' refused the messages: Only user, tool and assistant roles "
        "are supported!"
    )
    two = {**CALLED, "tool_calls": CALLED["tool_calls"] * 2}  # type: ignore[operator]
    with pytest.raises(InvalidInput, match="single tool-calls"):
        load("llama3").render(request(USER, two))


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "messages", "tools", "conversation", "tokenizer_kwargs"]
)
def test_variables_cannot_replace_the_template(tiny: ChatFormat, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"'{name}' is not a variable of chat templates"):
        tiny.render(request(USER, template_variables={name: "{{ 1 }}"}))


def test_variables_reach_the_template(tiny: ChatFormat) -> None:
    text = text_of(tiny, request(USER, template_variables={"enable_thinking": False}))
    assert text.endswith("<think>\n\n</think>\n\n")


def test_final_message_is_continued(tiny: ChatFormat) -> None:
    options: dict[str, Any] = {"continues_final_message": True, "has_generation_prompt": False}
    text = text_of(tiny, request(USER, ASSISTANT, **options))
    assert text.endswith("<|im_start|>assistant\nIt is noon.")
    opened = {"role": "assistant", "content": "<think>\nWell"}
    assert tiny.render(request(USER, opened, **options)).starts_in_reasoning
    closed = {"role": "assistant", "content": "<think>\nWell</think>\nSo"}
    assert not tiny.render(request(USER, closed, **options)).starts_in_reasoning


def test_open_reasoning_in_the_prompt_is_continued(load: Callable[..., ChatFormat]) -> None:
    chat = load("hermes")
    asked = request(USER, template_variables={"opens_reasoning": True}, tools=[TOOL])
    prompt = chat.render(asked)
    assert prompt.starts_in_reasoning
    parser = chat.new_parser(asked, prompt)
    tokens = chat.tokenizer.encode("Hm.\n</think>\n\nNoon.", add_special_tokens=False)
    answer = collect([*parser.feed(tokens), *parser.finish()])
    assert (answer.reasoning, answer.text) == ("Hm.", "Noon.")
    asked_user = request({"role": "user", "content": "What is <think>"})
    assert not chat.render(asked_user).starts_in_reasoning


def test_forced_calls_end_open_reasoning(load: Callable[..., ChatFormat]) -> None:
    chat = load("hermes")
    variables = {"opens_reasoning": True}
    asked = request(USER, tools=[TOOL], forced_tool="now", template_variables=variables)
    prompt = chat.render(asked)
    assert not prompt.starts_in_reasoning
    text = chat.tokenizer.decode(prompt.tokens)
    assert text.endswith('<think>\n</think>\n\n<tool_call>\n{"name": "now", "arguments":')


def test_reasoning_stays_in_the_text_if_asked(tiny: ChatFormat) -> None:
    asked = request(USER, separates_reasoning=False)
    parser = tiny.new_parser(asked, tiny.render(asked))
    tokens = tiny.tokenizer.encode("<think>a</think>b", add_special_tokens=False)
    assert collect([*parser.feed(tokens), *parser.finish()]).text == "<think>a</think>b"


def test_end_of_turn_is_that_of_the_template(load: Callable[..., ChatFormat]) -> None:
    chat = load("llama3")
    assert [chat.texts.special[token] for token in chat.end_tokens] == ["<|eot_id|>"]
    assert ChatFormat("a/model", ToyTokenizer()).end_tokens == ()


def test_models_without_template_get_roles_as_text() -> None:
    chat = ChatFormat("a/model", ToyTokenizer())
    system = {"role": "system", "content": "Be brief."}
    rendered = chat.render(request(system, USER))
    text = "System: Be brief.\n\nUser: What time is it?\n\nAssistant:"
    assert bytes(rendered.tokens).decode() == text
    ended = chat.render(request(USER, has_generation_prompt=False))
    assert bytes(ended.tokens).decode() == "User: What time is it?\n\n"
    continued = chat.render(request(USER, ASSISTANT, continues_final_message=True))
    assert bytes(continued.tokens).decode().endswith("\n\nAssistant: It is noon.")
    with pytest.raises(InvalidInput, match="message of the assistant"):
        chat.render(request(USER, continues_final_message=True))
    parser = chat.new_parser(request(USER), rendered)
    answer = collect([*parser.feed(b" Noon.\n\nUser: Thanks"), *parser.finish()])
    assert answer.text == "Noon.\n" and parser.stop_text is None


def test_every_template_has_a_test() -> None:
    assert {*CALLS, "plain"} == set(TEMPLATES)
