"""Tokenizer files: names, limits and digests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinkex import tokenizer_files
from tinkex.errors import InvalidInput
from tinkex.models import TINY_FOLDER
from tinkex.tokenizer_files import check_tokenizer_files, digest_files, read_tokenizer_files


def test_only_tokenizer_files_are_read() -> None:
    files = read_tokenizer_files(TINY_FOLDER)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= files.keys()
    assert "model.safetensors" not in files and "generation_config.json" not in files
    assert list(json.loads(files["config.json"])) == ["model_type"]
    check_tokenizer_files(files, digest_files(files))


def test_folder_without_tokenizer_is_empty(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenization_mine.py").write_text("print('code')")
    assert read_tokenizer_files(tmp_path) == {}


def test_digest_covers_names_and_contents() -> None:
    one = {"vocab.json": b"ab", "merges.txt": b"c"}
    assert digest_files(one) == digest_files(dict(reversed(one.items())))
    others = ({"vocab.json": b"a", "merges.txt": b"bc"}, {"vocab.txt": b"ab", "merges.txt": b"c"})
    assert digest_files(one) not in {digest_files(other) for other in others}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"../escape": b"x"}, r"'../escape' is not a file of a tokenizer"),
        ({"tokenization_mine.py": b"x"}, "is not a file of a tokenizer"),
        ({}, "do not have the digest"),
    ],
)
def test_unknown_file_is_refused(files: dict[str, bytes], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        check_tokenizer_files(files, digest_files(files))


def test_wrong_digest_is_refused() -> None:
    with pytest.raises(InvalidInput, match="do not have the digest"):
        check_tokenizer_files({"vocab.txt": b"x"}, "0" * 64)


def test_too_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "MAX_TOKENIZER_BYTES", 5)
    (tmp_path / "vocab.txt").write_bytes(b"123456")
    with pytest.raises(InvalidInput, match="the tokenizer has 6 bytes; at most 5 are sent"):
        read_tokenizer_files(tmp_path)
    with pytest.raises(InvalidInput, match="the tokenizer has 6 bytes; at most 5 are read"):
        check_tokenizer_files({"vocab.txt": b"123456"}, "")
