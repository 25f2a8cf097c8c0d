"""Byte-level BPE tokenizers of GGUF files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.gguf_files import TEMPLATE, TOKENS, write_gguf
from tinkex.engine.models.gguf.convert import convert_gguf
from tinkex.engine.models.gguf.reader import GgufFile, read_gguf
from tinkex.engine.models.gguf.tokenizer import (
    PRE_TOKENIZERS,
    UnsupportedTokenizer,
    special_token_ids,
    special_tokens,
    tokenizer_files,
)
from tinkex.engine.models.weight_files import UnusableModel


def header_with(**changes: Any) -> GgufFile:
    """A header that has only a tokenizer."""
    kinds = [3] * 3 + [1] * (len(TOKENS) - 3)
    facts = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": list(TOKENS),
        "token_type": kinds,
        "merges": ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "Ġ w"],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    facts |= changes
    named = {f"tokenizer.ggml.{name}": x for name, x in facts.items() if x is not None}
    return GgufFile(path=Path("a.gguf"), metadata=named, tensors={})


def build_tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(header_with(**changes))["tokenizer.json"].decode())


def pre_tokenize(tokenizer: Tokenizer, text: str) -> list[str]:
    """The words of the pre-tokenizer."""
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


TOKENIZERS = {name: build_tokenizer(pre=name) for name in PRE_TOKENIZERS}


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
@settings(deadline=None)
@given(text=st.text())
def test_encode_decode_round_trip(name: str, text: str) -> None:
    import unicodedata

    tokenizer = TOKENIZERS[name]
    # qwen2 normalizes to NFC.
    expected = unicodedata.normalize("NFC", text) if name == "qwen2" else text
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_smollm_splits_digits() -> None:
    assert build_tokenizer(pre="smollm").encode("12").tokens == ["1", "2"]
    assert build_tokenizer(pre="gpt-2").encode("12").tokens == ["12"]
    assert pre_tokenize(build_tokenizer(pre="qwen2"), "x 1234") == ["x", "Ġ", "1", "2", "3", "4"]
    assert pre_tokenize(build_tokenizer(pre="llama-bpe"), "x 1234") == ["x", "Ġ", "123", "4"]


def test_qwen2_pre_tokenization() -> None:
    words = ["I", "'m", "Ġfine", ",", "Ġ", "Ġyou", "?!ĊĊ", "ok"]
    assert pre_tokenize(build_tokenizer(pre="qwen2"), "I'm fine,  you?!\n\nok") == words
    assert pre_tokenize(build_tokenizer(pre="gpt-2"), "I'm fine,  you") == [
        "I",
        "'m",
        "Ġfine",
        ",",
        "Ġ",
        "Ġyou",
    ]


def test_merges_come_from_file() -> None:
    assert build_tokenizer().encode("hello hello world").tokens[:3] == ["hello", "Ġhello", "Ġw"]


def test_control_tokens_keep_their_ids() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.encode("<|im_start|>hello<|im_end|>").ids == [1, TOKENS.index("hello"), 2]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_user_defined_tokens_are_not_special() -> None:
    kinds = [3] * 3 + [1] * (len(TOKENS) - 3) + [4]
    tokenizer = build_tokenizer(tokens=[*TOKENS, "<think>"], token_type=kinds)
    assert tokenizer.encode("a<think>").ids[-1] == len(TOKENS)
    assert tokenizer.decode([len(TOKENS)], skip_special_tokens=True) == "<think>"


def test_unused_tokens_are_not_in_vocab() -> None:
    kinds = [3] * 3 + [1] * (len(TOKENS) - 3) + [5]
    tokenizer = build_tokenizer(tokens=[*TOKENS, "[PAD1]"], token_type=kinds)
    assert len(TOKENS) not in tokenizer.get_vocab().values()


@pytest.mark.parametrize(
    ("pre", "add_bos", "has_bos"),
    [
        ("smollm", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", True, True),
    ],
)
def test_bos_token_is_prepended(pre: str, add_bos: bool | None, has_bos: bool) -> None:
    ids = build_tokenizer(pre=pre, add_bos_token=add_bos).encode("hello").ids
    assert (ids[0] == 1) == has_bos
    assert len(ids) == 1 + has_bos


def test_pad_token_defaults_to_eos() -> None:
    assert special_tokens(header_with())["pad_token"] == "<|im_end|>"
    assert special_tokens(header_with(padding_token_id=0))["pad_token"] == "<|endoftext|>"
    assert "bos_token" not in special_tokens(header_with(bos_token_id=10**6))


def test_all_eos_token_ids_are_listed() -> None:
    assert special_token_ids(header_with())["eos_token_id"] == 2
    assert special_token_ids(header_with(eot_token_id=0))["eos_token_id"] == [2, 0]
    assert special_token_ids(header_with(eot_token_id=2))["eos_token_id"] == 2
    assert "eos_token_id" not in special_token_ids(header_with(eos_token_id=None))


def test_chat_template_is_kept(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "model.gguf"))
    settings = json.loads(tokenizer_files(file)["tokenizer_config.json"])
    assert settings["chat_template"] == TEMPLATE
    assert (settings["eos_token"], settings["pad_token"]) == ("<|im_end|>", "<|im_end|>")
    assert settings["model_max_length"] == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "falcon"}, "uses the pre-tokenizer 'falcon', which is not supported"),
        ({"pre": None}, "the pre-tokenizer None,"),
        ({"model": "bert"}, "of type 'bert'"),
        ({"model": None}, "has no tokenizer"),
    ],
)
def test_unsupported_tokenizer_is_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedTokenizer) as refused:
        tokenizer_files(header_with(**changes))
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "without tokens"),
        ({"merges": None}, "without merges"),
        ({"merges": ["h"]}, "invalid merge 'h'"),
        ({"merges": ["h h"]}, "invalid merge 'h h'"),
        ({"tokens": [*TOKENS, "h"], "token_type": None}, "a token twice"),
        ({"token_type": [1]}, "but not one type for each"),
    ],
)
def test_inconsistent_tokenizer_is_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableModel) as refused:
        tokenizer_files(header_with(**changes))
    assert not isinstance(refused.value, UnsupportedTokenizer)
    assert words in refused.value.message


def test_unsupported_tokenizer_is_skipped_with_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_gguf(tmp_path / "model.gguf", pre="falcon")
    with caplog.at_level(logging.WARNING, "tinkex"):
        folder = convert_gguf(source, tmp_path / "model")
    assert not folder.has_tokenizer
    assert "add the tokenizer files of the model" in caplog.text
    assert gguf.GGUFReader(source).tensors
