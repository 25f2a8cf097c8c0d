"""Answers of real tokenizers give the same events however their tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.answers import Collected, collect
from tests.support.chat_templates import SPECIAL_TOKENS, save_family
from tests.support.sentencepiece_tokenizer import sentencepiece_tokenizer
from tinkex.server.inference.chat_format import ChatFormat, RenderedChat
from tinkex.server.inference.chat_request import ChatRequest, SamplingSettings
from tinkex.text import load_tokenizer

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FAMILIES = ("hermes", "qwen-xml", "llama3", "mistral")
TEXTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "f"),
        *("<function=f>", "<parameter=x>", "</parameter>", "</function>", "<|python_tag|>"),
        *('{"name": "f", "arguments": {"x": "\U0001f600"}}', '{"name": "f", "parameters": {}}'),
        *("\U0001f469\u200d\U0001f467", "na\u00efve", " word", "\n", "{", "}", "[", "]", "<", "ab"),
    ]
)
#: Single bytes of tinkex/tiny, and special tokens: broken characters between anything.
TOKENS = st.integers(0, 300)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=10)


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatFormat]:
    root: Path = tmp_path_factory.mktemp("formats")
    found = {
        name: ChatFormat(name, load_tokenizer(str(save_family(root / name, name))))
        for name in FAMILIES
    }
    found["sentencepiece"] = ChatFormat("sentencepiece", sentencepiece_tokenizer())
    return found


def parse(chat: ChatFormat, request: ChatRequest, batches: Sequence[Sequence[int]]) -> Collected:
    parser = chat.new_parser(request, RenderedChat(tokens=()))
    events = [event for batch in batches for event in parser.feed(batch)]
    return collect([*events, *parser.finish()])


@pytest.mark.parametrize("name", [*FAMILIES, "sentencepiece"])
@given(data=st.data())
def test_batches_do_not_change_the_answer(
    formats: dict[str, ChatFormat], name: str, data: st.DataObject
) -> None:
    chat = formats[name]
    text = "".join(data.draw(st.lists(TEXTS, max_size=8)))
    tokens = chat.tokenizer.encode(text, add_special_tokens=False)
    for position in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=3))):
        tokens.insert(position, data.draw(TOKENS))
    stops = tuple(data.draw(st.lists(st.sampled_from(["b", "\n\n", "}}", "word<"]), max_size=2)))
    request = ChatRequest(
        model=name,
        messages=[USER],
        tools=[TOOL] if chat.family else (),
        sampling=SamplingSettings(stop=stops),
    )
    sizes = data.draw(SIZES) * len(tokens)
    batches, start = [], 0
    for size in sizes:
        batches.append(tokens[start : start + size])
        start += size
    whole = parse(chat, request, [tokens])
    assert parse(chat, request, batches) == whole
    assert not any(stop in whole.text for stop in stops)


@pytest.mark.parametrize("name", ["hermes", "mistral"])
@given(st.lists(st.integers(13, 1535), max_size=40))
def test_text_without_marks_is_that_of_the_tokenizer(
    formats: dict[str, ChatFormat], name: str, tokens: list[int]
) -> None:
    chat = formats[name]
    request = ChatRequest(model=name, messages=[USER], tools=[TOOL])
    answer = parse(chat, request, [[token] for token in tokens])
    text = chat.tokenizer.decode(tokens, skip_special_tokens=True)
    assert (answer.text, answer.calls) == (text, [])


def test_special_tokens_are_shown_only_as_parts_of_calls(formats: dict[str, ChatFormat]) -> None:
    chat = formats["mistral"]
    request = ChatRequest(model="mistral", messages=[USER], tools=[TOOL])
    tokens = chat.tokenizer.encode("[INST]a[/INST][TOOL_CALLS]f[ARGS]{}", add_special_tokens=False)
    assert len(set(tokens) & set(chat.texts.special)) == len(SPECIAL_TOKENS["mistral"])
    answer = parse(chat, request, [[token] for token in tokens])
    assert (answer.text, answer.calls) == ("a", [("f", "{}")])
