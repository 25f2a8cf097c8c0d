"""The tokenizer of a GGUF file as the files that transformers and tokenizers read.

What cannot be rebuilt exactly is not rebuilt: no tokenizer is better than one that is nearly right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tinkex.engine.models.gguf.byte_pairs import byte_level_bpe_parts
from tinkex.engine.models.gguf.reading import GgufFile
from tinkex.engine.models.gguf.sentence_pieces import sentencepiece_parts
from tinkex.engine.models.gguf.tokens import (
    GgufVocab,
    UnsupportedTokenizer,
    read_vocab,
    special_tokens,
)

_PARTS_BY_MODEL: Mapping[str, Callable[[GgufFile, GgufVocab], dict[str, Any]]] = {
    "gpt2": byte_level_bpe_parts,
    "llama": sentencepiece_parts,
}


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """The files of the tokenizer; UnknownTokenizer if it cannot be rebuilt exactly."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise UnsupportedTokenizer(f"{file.path} has no tokenizer")
    if kind not in _PARTS_BY_MODEL:
        raise UnsupportedTokenizer(
            f"the tokenizer of {file.path} is of the kind {kind!r:.60}; {', '.join(_PARTS_BY_MODEL)} are "
            "rebuilt"
        )
    tokens = read_vocab(file)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens.added_tokens(),
        **_PARTS_BY_MODEL[kind](file, tokens),
    }
    return {
        "tokenizer.json": to_json(content),
        "tokenizer_config.json": to_json(_tokenizer_config(file)),
    }


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """What tokenizer.json has no word for."""
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_tokens(file),
    }
    arch = file.metadata.get("general.architecture")
    if isinstance(limit := file.metadata.get(f"{arch}.context_length"), int):
        found["model_max_length"] = limit
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        found["chat_template"] = template
    return found


def to_json(content: Mapping[str, Any]) -> bytes:
    """A file for people and programs."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
