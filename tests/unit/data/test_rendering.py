from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.data.rendering import RenderedExample, Renderer
from tinkex.data.rows import ChatRow, PreferenceRow, PromptCompletionRow
from tinkex.errors import InvalidInput
from tinkex.testing import ToyTokenizer

EOS = 256
USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "yo"}
ROLES = st.sampled_from(["system", "user", "assistant"])


class Templated(ToyTokenizer):
    """Renders [role]content; optionally drops earlier reasoning, as some templates do."""

    chat_template = "yes"

    def __init__(self, drops_thoughts: bool = False) -> None:
        self._drops_thoughts = drops_thoughts

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, **options: Any
    ) -> list[int]:
        text = ""
        for index, message in enumerate(messages):
            content = message["content"]
            if self._drops_thoughts and index < len(messages) - 1:
                content = content.rpartition("|")[2]
            text += f"[{message['role'][0]}]{content};"
        return list((text + ("[a]" if add_generation_prompt else "")).encode())


class WithFirst(ToyTokenizer):
    """Adds a BOS token."""

    bos_token_id = 300

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        tokens = super().encode(text)
        return [300, *tokens] if add_special_tokens else tokens


def learned(example: RenderedExample) -> list[int]:
    return [t for t, is_in in zip(example.tokens, example.is_learned, strict=True) if is_in]


def test_completion_and_eos_are_targets_and_the_prompt_is_not() -> None:
    (example,) = Renderer(ToyTokenizer()).render_examples(PromptCompletionRow("ab", "cd"))
    assert list(example.tokens) == [*b"abcd", EOS]
    assert learned(example) == [*b"cd", EOS]


def test_datum_targets_are_shifted_by_one() -> None:
    (example,) = Renderer(ToyTokenizer()).render_examples(PromptCompletionRow("ab", "cd"))
    datum = example.to_datum(0.5)
    assert datum.model_input.to_ints() == list(b"abcd")
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [*b"bcd", EOS]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0, 0.5, 0.5, 0.5]
    assert example.sum_target_logprobs([1.0, 2.0, 4.0, 8.0]) == 14.0


def test_bos_token_comes_first() -> None:
    (example,) = Renderer(WithFirst()).render_examples(PromptCompletionRow("a", "b"))
    assert list(example.tokens) == [300, *b"ab", EOS]
    assert Renderer(WithFirst()).render_prompt("a") == [300, *b"a"]
    (chat,) = Renderer(WithFirst()).render_examples(ChatRow((USER, BOT)))
    assert chat.tokens[0] == 300
    assert not chat.is_learned[0]


def test_template_renders_and_only_assistant_turns_are_targets() -> None:
    row = ChatRow((USER, BOT, USER, {"role": "assistant", "content": "zz"}))
    (example,) = Renderer(Templated()).render_examples(row)
    assert bytes(example.tokens) == b"[u]hi;[a]yo;[u]hi;[a]zz;"
    assert bytes(learned(example)) == b"yo;zz;"


def test_template_that_rewrites_earlier_turns_gives_one_example_per_turn() -> None:
    thoughtful = {"role": "assistant", "content": "hm|yo"}
    row = ChatRow((USER, thoughtful, USER, thoughtful))
    first, second = Renderer(Templated(drops_thoughts=True)).render_examples(row)
    assert bytes(first.tokens) == b"[u]hi;[a]hm|yo;"
    assert bytes(second.tokens) == b"[u]hi;[a]yo;[u]hi;[a]hm|yo;"
    assert bytes(learned(first)) == bytes(learned(second)) == b"hm|yo;"


def test_conversation_may_start_with_the_assistant() -> None:
    first, second = Renderer(Templated()).render_examples(ChatRow((BOT, USER, BOT)))
    assert bytes(learned(first)) == b"[a]yo;"
    assert bytes(learned(second)) == b"yo;"


def test_plain_layout_without_a_template() -> None:
    (example,) = Renderer(ToyTokenizer()).render_examples(ChatRow((USER, BOT)))
    assert list(example.tokens) == [*b"User: hi\n\nAssistant: yo", EOS, *b"\n\n"]
    assert learned(example) == [*b" yo", EOS]
    assert Renderer(ToyTokenizer()).render_prompt((USER,)) == list(b"User: hi\n\nAssistant:")


def test_non_text_content_is_rejected_without_a_template() -> None:
    message = {"role": "assistant", "content": [{"type": "image"}]}
    with pytest.raises(InvalidInput, match="no plain text"):
        Renderer(ToyTokenizer()).render_examples(ChatRow((message,)))


@pytest.mark.parametrize("tokenizer", [ToyTokenizer(), Templated()])
def test_pair_shares_the_prompt_and_only_answers_are_targets(tokenizer: ToyTokenizer) -> None:
    history = (USER, BOT, USER)
    chosen, rejected = Renderer(tokenizer).render_pair(PreferenceRow(history, "good", "bad"))
    size = chosen.is_learned.index(True)
    assert chosen.tokens[:size] == rejected.tokens[:size]
    assert b"good" in bytes(t for t in learned(chosen) if t < 256)
    assert b"yo" not in bytes(t for t in learned(chosen) if t < 256)
    assert b"bad" in bytes(t for t in learned(rejected) if t < 256)


def test_pair_with_a_text_prompt() -> None:
    chosen, rejected = Renderer(ToyTokenizer()).render_pair(PreferenceRow("q", "y", "no"))
    assert learned(chosen) == [*b"y", EOS]
    assert learned(rejected) == [*b"no", EOS]


def test_long_examples_are_truncated_and_counted() -> None:
    (example,) = Renderer(ToyTokenizer(), max_tokens=3).render_examples(
        PromptCompletionRow("ab", "cd")
    )
    assert (list(example.tokens), example.num_truncated, example.num_learned) == (
        list(b"abc"),
        2,
        1,
    )
    (nothing,) = Renderer(ToyTokenizer(), max_tokens=2).render_examples(
        PromptCompletionRow("ab", "cd")
    )
    assert nothing.num_learned == 0


@given(
    st.lists(st.tuples(ROLES, st.text(max_size=5)), max_size=5),
    st.integers(2, 60),
    st.sampled_from([ToyTokenizer(), WithFirst(), Templated(), Templated(drops_thoughts=True)]),
)
def test_tokens_and_mask_have_equal_lengths(
    turns: list[tuple[str, str]], limit: int, tokenizer: ToyTokenizer
) -> None:
    messages = [{"role": role, "content": content} for role, content in [*turns, ("assistant", "")]]
    for example in Renderer(tokenizer, limit).render_examples(ChatRow(tuple(messages))):
        assert len(example.tokens) == len(example.is_learned) <= limit
        datum = example.to_datum()
        assert datum.model_input.length == len(example.tokens) - 1
        weights = datum.loss_fn_inputs["weights"].tolist()
        assert sum(weights) == example.num_learned
