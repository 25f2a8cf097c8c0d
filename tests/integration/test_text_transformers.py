"""A local tokenizer directory with transformers: AutoTokenizer and chat templates."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from tinkex.errors import InvalidInput
from tinkex.models import TINY_FOLDER
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


@pytest.mark.parametrize("model_type", [None, "qwen3", "llama"])
def test_generic_tokenizer_equals_that_of_auto_tokenizer(
    tmp_path: Path, model_type: str | None
) -> None:
    from transformers import AutoTokenizer

    for path in TINY_FOLDER.iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja":
            shutil.copy(path, tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, auto = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(auto)
    for text in ("", "  two  spaces\n", "naïve 12,345 <|im_end|> 🙂"):
        assert encode(ours, text) == auto.encode(text)
        assert ours.decode(auto.encode(text)) == auto.decode(auto.encode(text))
    chat = [{"role": "user", "content": "hello"}]
    assert render_chat(ours, chat) == render_chat(auto, chat)
    for name in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "all_special_ids",
        "chat_template",
    ):
        assert getattr(ours, name) == getattr(auto, name)


def test_generic_tokenizer_is_loaded_without_torch(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, TEMPLATE)
    probe = (
        "import sys; from tinkex.text import load_tokenizer, render_chat\n"
        f"render_chat(load_tokenizer({folder!r}), [{{'role': 'user', 'content': 'hello'}}])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_class_of_its_own_is_not_replaced(tmp_path: Path) -> None:
    """A model type whose tokenizer has its own class in transformers gets that class."""
    folder = make_folder(tmp_path, None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = load_tokenizer(folder)
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"


CHATS = (
    [{"role": "user", "content": "hello <|im_end|> 🙂"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two  spaces\n"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\nyes"},
        {"role": "user", "content": "naïve 12,345"},
    ],
)


def assert_equal_tokenizers(folder: Path) -> None:
    """The minimal tokenizer of a folder computes what that of transformers computes."""
    minimal, full = load_tokenizer(str(folder), is_minimal=True), load_tokenizer(str(folder))
    assert type(minimal).__name__ == "FileTokenizer"
    for text in ("", "  two  spaces\n", "naïve 12,345 <|im_end|> 🙂 hello [UNK]"):
        for has_special in (True, False):
            tokens = encode(full, text, has_special)
            assert encode(minimal, text, has_special) == tokens
            decoded = full.decode(tokens, skip_special_tokens=has_special)
            assert minimal.decode(tokens, skip_special_tokens=has_special) == decoded
    for name in ("bos_token_id", "eos_token_id", "all_special_ids", "chat_template"):
        assert getattr(minimal, name) == getattr(full, name)
    for chat in CHATS if minimal.chat_template else ():
        for has_prompt in (True, False):
            assert render_chat(minimal, chat, has_prompt) == render_chat(full, chat, has_prompt)


def test_minimal_tokenizer_equals_that_of_transformers(tmp_path: Path) -> None:
    assert_equal_tokenizers(TINY_FOLDER)
    make_folder(tmp_path, TEMPLATE.replace("{% if m['role'] == 'system' %}", "{% if false %}"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = [
        {"id": 0, "content": "[UNK]", "special": True, "single_word": False}
        | dict.fromkeys(("lstrip", "rstrip", "normalized"), False)
    ]
    content["truncation"] = {
        "max_length": 1,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert_equal_tokenizers(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": True, "bos_token": "<|im_start|>"},
        {"eos_token": "<not there>"},
        {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}},
        {"extra_special_tokens": ["<think>"]},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"chat_template": "{% generation %}a{% endgeneration %}"},
    ],
)
def test_other_settings_take_transformers(tmp_path: Path, settings: dict[str, object]) -> None:
    config = json.loads((TINY_FOLDER / "tokenizer_config.json").read_text())
    shutil.copy(TINY_FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | settings))
    tokenizer = load_tokenizer(str(tmp_path), is_minimal=True)
    assert type(tokenizer).__module__.startswith("transformers")


def test_template_cannot_reach_internals(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, None)
    config = json.loads((TINY_FOLDER / "tokenizer_config.json").read_text())
    shutil.copy(TINY_FOLDER / "tokenizer.json", tmp_path)
    template = "{% set n = namespace(__class__=1) %}{{ messages[0].__class__ }}"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": template})
    )
    tokenizer = load_tokenizer(folder, is_minimal=True)
    with pytest.raises(InvalidInput, match="cannot set '__class__'"):
        render_chat(tokenizer, [{"role": "user", "content": "hello"}])
