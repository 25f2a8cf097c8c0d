"""Bytes and texts of single tokens, and their incremental decoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sentencepiece_tokenizer import sentencepiece_tokenizer
from tinkex.models import TINY_FOLDER
from tinkex.server.inference.token_texts import TextOffsets, TokenTexts
from tinkex.testing import ToyTokenizer
from tinkex.text import Tokenizer, load_tokenizer

TINY = load_tokenizer(str(TINY_FOLDER))
SENTENCEPIECE = sentencepiece_tokenizer()
TOKENIZERS: list[Tokenizer] = [TINY, SENTENCEPIECE, ToyTokenizer()]
TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("aHello world \u00e9\U0001f600\u200d")),
    max_size=20,
)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def decode_all(tokenizer: Tokenizer, tokens: list[int]) -> str:
    decoder = TokenTexts(tokenizer).new_decoder()
    return "".join([*map(decoder.push, tokens), decoder.flush()])


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(text=TEXTS)
def test_text_equals_that_of_all_tokens(tokenizer: Tokenizer, text: str) -> None:
    tokens = encode(tokenizer, text)
    assert decode_all(tokenizer, tokens) == tokenizer.decode(tokens, skip_special_tokens=True)


@given(st.lists(st.integers(13, 1535), max_size=30))
def test_broken_characters_are_replaced_as_by_the_tokenizer(tokens: list[int]) -> None:
    assert decode_all(TINY, tokens) == TINY.decode(tokens)


@given(TEXTS)
def test_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    raw = b"".join(map(TokenTexts(TINY).bytes_of, encode(TINY, text)))
    assert raw == TINY.decode(encode(TINY, text)).encode()


def test_bytes_of_sentencepiece_tokens() -> None:
    texts = TokenTexts(SENTENCEPIECE)
    pieces = [texts.bytes_of(token) for token in encode(SENTENCEPIECE, "a \u20ac")]
    assert b"".join(pieces) == " a \u20ac".encode()
    assert pieces[-3:] == [b"\xe2", b"\x82", b"\xac"]


def test_tokens_without_text_have_no_bytes() -> None:
    assert TokenTexts(TINY).bytes_of(99_999) == b""
    assert TokenTexts(ToyTokenizer()).bytes_of(300) == b""


def test_added_tokens_are_text_unless_special() -> None:
    texts = TokenTexts(TINY)
    assert {"<|im_end|>", "<|im_start|>"} < set(texts.special.values())
    think = encode(TINY, "<think>")
    assert len(think) == 1 and think[0] not in texts.special
    assert texts.text_of(think[0]) == "<think>"
    assert set(TokenTexts(ToyTokenizer()).special.values()) == {"<eos>"}


def test_context_keeps_the_space_of_the_first_word() -> None:
    texts = TokenTexts(SENTENCEPIECE)
    hello, world = encode(SENTENCEPIECE, "Hello"), encode(SENTENCEPIECE, "world")
    assert texts.new_decoder().push(world[0]).startswith(" ") is False
    decoder = texts.new_decoder([*hello, SENTENCEPIECE.eos_token_id])
    assert "".join(map(decoder.push, world)) == " world"


@pytest.mark.parametrize("tokenizer", [TINY, ToyTokenizer()])
@given(text=TEXTS)
def test_offsets_are_positions_in_the_text(tokenizer: Tokenizer, text: str) -> None:
    texts, tokens = TokenTexts(tokenizer), encode(tokenizer, text)
    offsets = TextOffsets(texts)
    ends = [*map(offsets.push, tokens), len(text)]
    assert ends == sorted(ends)
    for index, token in enumerate(tokens):
        if "\ufffd" not in (own := texts.text_of(token)):
            assert text[ends[index] :].startswith(own)
