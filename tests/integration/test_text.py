"""Tokenizers of local folders and the hub."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tokenizers

from tests.support.fake_tokenizer import FakeTokenizer
from tinkex.errors import InvalidInput
from tinkex.installation import install_command
from tinkex.text import (
    Tokenizer,
    encode,
    load_tokenizer,
    render_chat,
)

VOCABULARY = {"[UNK]": 0, "[BOS]": 1, "hello": 2, "world": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny word-level tokenizer that begins every text with [BOS]."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 1)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import transformers` fail, as if it were not installed."""
    monkeypatch.setitem(sys.modules, "transformers", None)


@pytest.mark.usefixtures("without_transformers")
def test_local_folder_works_without_transformers(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer, Tokenizer)
    assert encode(tokenizer, "hello world") == [1, 2, 3]
    assert encode(tokenizer, "hello world", add_special_tokens=False) == [2, 3]
    assert tokenizer.decode([2, 3]) == "hello world"
    assert load_tokenizer(str(folder)) is tokenizer


@pytest.mark.usefixtures("without_transformers")
def test_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert encode(load_tokenizer(f"~/{folder.name}"), "world") == [1, 3]


@pytest.mark.usefixtures("without_transformers")
def test_hub_name_without_transformers_suggests_installation() -> None:
    with pytest.raises(InvalidInput, match="Failed to load tokenizer 'no/such-model': ") as caught:
        load_tokenizer("no/such-model")
    assert "transformers is not installed" in caught.value.message
    assert caught.value.hint is not None
    assert install_command("text") in caught.value.hint


@pytest.mark.usefixtures("without_transformers")
def test_invalid_file_fails_and_is_retried(folder: Path) -> None:
    good = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match="Failed to load tokenizer"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_bytes(good)
    assert encode(load_tokenizer(str(folder)), "hello") == [1, 2]


@pytest.mark.usefixtures("without_transformers")
def test_text_that_is_not_unicode_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="ud800"):
        encode(load_tokenizer(str(folder)), "a\ud800")


@pytest.mark.usefixtures("without_transformers")
def test_missing_chat_template_is_reported(folder: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    for tokenizer in (FakeTokenizer(None), load_tokenizer(str(folder))):
        with pytest.raises(InvalidInput, match="has no chat template"):
            render_chat(tokenizer, chat)
