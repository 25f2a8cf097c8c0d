"""A local tokenizer directory with transformers: AutoTokenizer and chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from tinkex.errors import InvalidInput
from tinkex.text import encode, load_tokenizer, render_chat

pytest.importorskip("transformers")

WORDS = ("[UNK]", "user", "assistant", ":", "hello", "world")
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def make_folder(folder: Path, chat_template: str | None) -> str:
    """Write the files that AutoTokenizer reads."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    if chat_template:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_local_tokenizer_with_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, TEMPLATE))
    assert encode(tokenizer, "hello world unknown") == [4, 5, 0]
    chat = [{"role": "user", "content": "hello world"}]
    assert render_chat(tokenizer, chat) == [1, 3, 4, 5, 2, 3]
    assert render_chat(tokenizer, chat, add_generation_prompt=False) == [1, 3, 4, 5]
    assert load_tokenizer(str(tmp_path)) is tokenizer


def test_chat_template_error_is_reported(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, TEMPLATE))
    with pytest.raises(InvalidInput, match="refused the messages: no system role"):
        render_chat(tokenizer, [{"role": "system", "content": "hello"}])


def test_base_model_has_no_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, None))
    with pytest.raises(InvalidInput, match="has no chat template"):
        render_chat(tokenizer, [{"role": "user", "content": "hello"}])


def test_empty_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="Failed to load tokenizer"):
        load_tokenizer(str(tmp_path))
