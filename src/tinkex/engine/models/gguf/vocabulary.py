"""The tokenizer of a GGUF file as the files that transformers and tokenizers read.

What cannot be rebuilt exactly is not rebuilt: no tokenizer is better than one that is nearly right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tinkex.engine.models.gguf.byte_pairs import byte_pair_parts
from tinkex.engine.models.gguf.reading import Gguf
from tinkex.engine.models.gguf.sentence_pieces import sentence_piece_parts
from tinkex.engine.models.gguf.tokens import Tokens, UnknownTokenizer, read_tokens, special_tokens

_PARTS: Mapping[str, Callable[[Gguf, Tokens], dict[str, Any]]] = {
    "gpt2": byte_pair_parts,
    "llama": sentence_piece_parts,
}


def tokenizer_files(file: Gguf) -> dict[str, bytes]:
    """The files of the tokenizer; UnknownTokenizer if it cannot be rebuilt exactly."""
    kind = file.facts.get("tokenizer.ggml.model")
    if kind is None:
        raise UnknownTokenizer(f"{file.path} has no tokenizer")
    if kind not in _PARTS:
        raise UnknownTokenizer(
            f"the tokenizer of {file.path} is of the kind {kind!r:.60}; {', '.join(_PARTS)} are "
            "rebuilt"
        )
    tokens = read_tokens(file)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens.added(),
        **_PARTS[kind](file, tokens),
    }
    return {"tokenizer.json": to_json(content), "tokenizer_config.json": to_json(_settings(file))}


def _settings(file: Gguf) -> dict[str, Any]:
    """What tokenizer.json has no word for."""
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_tokens(file),
    }
    arch = file.facts.get("general.architecture")
    if isinstance(limit := file.facts.get(f"{arch}.context_length"), int):
        found["model_max_length"] = limit
    if isinstance(template := file.facts.get("tokenizer.chat_template"), str):
        found["chat_template"] = template
    return found


def to_json(content: Mapping[str, Any]) -> bytes:
    """A file for people and programs."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
