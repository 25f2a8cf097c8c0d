"""SentencePiece tokenizers of GGUF files match SentencePiece itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.sentencepiece_files import LINES, THEIRS, vocabulary
from tinkex.engine.models.gguf.tokenizer import UnsupportedTokenizer, tokenizer_files
from tinkex.engine.models.weight_files import UnusableModel


def build_tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(vocabulary(**changes))["tokenizer.json"].decode())


OURS = build_tokenizer()
WORDS = st.lists(st.sampled_from(" ".join(LINES).split()), min_size=1).map(" ".join)
LETTERS = st.text(st.sampled_from("then quick  ïé,'42\n\t你🙂"), min_size=1)


def is_plain(text: str) -> bool:
    """Whether a text has no symbol of the tokenizer itself, such as its space symbol."""
    return not any(sign in text for sign in ("\u2581", "<s>", "</s>", "<unk>", "\0"))


@settings(deadline=None)
@given(WORDS | LETTERS | st.text(min_size=1).filter(is_plain))
def test_tokens_match_sentencepiece(text: str) -> None:
    assert OURS.encode(text).ids == THEIRS.encode(text)


@settings(deadline=None)
@given(WORDS | LETTERS | st.text(min_size=1).filter(is_plain))
def test_encode_decode_round_trip(text: str) -> None:
    assert OURS.decode(OURS.encode(text).ids) == text


def test_bos_and_space_prefix_options() -> None:
    assert build_tokenizer(add_bos_token=None).encode("the").ids == [1, *THEIRS.encode("the")]
    bare = build_tokenizer(add_space_prefix=False)
    assert bare.decode(bare.encode(" the").ids) == " the"
    assert bare.encode(" the").ids == THEIRS.encode("the")


def test_control_tokens_are_not_split() -> None:
    assert OURS.encode("<s>").ids == [1]
    assert OURS.decode([1, *THEIRS.encode("the")], skip_special_tokens=True) == "the"


def test_normalizing_tokenizer_is_rejected() -> None:
    with pytest.raises(UnsupportedTokenizer, match="normalizes text"):
        build_tokenizer(remove_extra_whitespaces=True)


def test_scores_are_required() -> None:
    for scores in (None, [0.0]):
        with pytest.raises(UnusableModel, match="a score for each token"):
            build_tokenizer(scores=scores)
