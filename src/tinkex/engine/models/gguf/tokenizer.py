"""Tokenizers that merge bytes, as GPT-2's and most since: how each cuts text before it merges.

A file only names the way in which text is cut. Every name below stands for a way that is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinkex.engine.models.gguf.reader import GgufFile
from tinkex.engine.models.gguf.vocab import (
    NORMAL,
    UNKNOWN,
    GgufVocab,
    UnsupportedTokenizer,
    read_strings,
    read_vocab,
    special_tokens,
)
from tinkex.engine.models.weight_files import UnusableModel

#: Words with the blank before them, signs, line ends; digits in groups of at most so many.
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreTokenizer:
    """How text is cut into words before bytes are merged within them."""

    parts: tuple[Mapping[str, Any], ...]
    normalizer: Mapping[str, Any] | None = None
    ignores_merges: bool = False
    """Whether a word that is a token as a whole is taken so."""
    adds_bos: bool = False
    """Whether a text begins with the first token, if the file does not say."""


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


_GPT2 = _PreTokenizer(parts=(_byte_level(use_regex=True),))
_DIGITS = _PreTokenizer(
    parts=({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
)
_QWEN = _PreTokenizer(
    parts=(_split(_WORD_PATTERN % ""), _byte_level(use_regex=False)), normalizer={"type": "NFC"}
)
_LLAMA3 = _PreTokenizer(
    parts=(_split(_WORD_PATTERN % "{1,3}"), _byte_level(use_regex=False)),
    ignores_merges=True,
    adds_bos=True,
)
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "qwen2": _QWEN,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def byte_level_bpe_parts(file: GgufFile, vocab: GgufVocab) -> dict[str, Any]:
    """The parts of tokenizer.json that are particular to such a tokenizer."""
    name = file.metadata.get("tokenizer.ggml.pre")
    cutting = PRE_TOKENIZERS.get(str(name))
    if cutting is None:
        raise UnsupportedTokenizer(
            f"the tokenizer of {file.path} cuts text as {name!r:.60} does, which is not known; "
            f"known are {', '.join(PRE_TOKENIZERS)}"
        )
    adds_first = bool(file.metadata.get("tokenizer.ggml.add_bos_token", cutting.adds_bos))
    first = special_tokens(file).get("bos_token") if adds_first else None
    return {
        "normalizer": cutting.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(cutting.parts)},
        "post_processor": vocab.bos_post_processor(first) or _byte_level(use_regex=True),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "ignore_merges": cutting.ignores_merges,
            "vocab": vocab.vocab,
            "merges": _read_merges(file, vocab),
        },
    }


def _read_merges(file: GgufFile, vocab: GgufVocab) -> list[list[str]]:
    merges = [merge.split(" ") for merge in read_strings(file, "merges")]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.vocab.keys():
            raise UnusableModel(f"{file.path} merges {' '.join(merge)!r:.60}, which it cannot")
    return merges


#: What stands for a blank.
SPACE_SYMBOL = "\u2581"


def sentencepiece_parts(file: GgufFile, vocab: GgufVocab) -> dict[str, Any]:
    """The parts of tokenizer.json that are particular to such a tokenizer."""
    facts = {
        name: file.metadata.get(f"tokenizer.ggml.{name}", default)
        for name, default in (
            ("add_space_prefix", True),
            ("add_bos_token", True),
            ("remove_extra_whitespaces", False),
            ("precompiled_charsmap", None),
        )
    }
    if facts["remove_extra_whitespaces"] or facts["precompiled_charsmap"]:
        raise UnsupportedTokenizer(
            f"the tokenizer of {file.path} changes text before it cuts it, in a way that is not "
            "rebuilt here"
        )
    prefix, strip = [], []
    if facts["add_space_prefix"]:
        prefix = [{"type": "Prepend", "prepend": SPACE_SYMBOL}]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    first = special_tokens(file).get("bos_token") if facts["add_bos_token"] else None
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prefix, _replace_rule(" ", SPACE_SYMBOL)],
        },
        "pre_tokenizer": None,
        "post_processor": vocab.bos_post_processor(first),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                _replace_rule(SPACE_SYMBOL, " "),
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": _unknown_token(vocab),
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab.vocab,
            "merges": _derive_merges(file, vocab),
        },
    }


def _replace_rule(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _unknown_token(vocab: GgufVocab) -> str | None:
    found = (
        text for text, kind in zip(vocab.texts, vocab.token_types, strict=True) if kind == UNKNOWN
    )
    return next(found, None)


def _derive_merges(file: GgufFile, vocab: GgufVocab) -> list[list[str]]:
    scores = _read_scores(file, len(vocab.texts))
    pieces = {
        text: token for text, token in vocab.vocab.items() if vocab.token_types[token] == NORMAL
    }
    # Equal scores are decided by the order of the tokens.
    ranked = sorted(pieces, key=lambda text: (-scores[pieces[text]], pieces[text]))
    return [pair for text in ranked for pair in _merge_pairs(text, pieces)]


def _read_scores(file: GgufFile, count: int) -> list[float]:
    scores: Any = file.metadata.get("tokenizer.ggml.scores")
    is_list = isinstance(scores, list) and len(scores) == count
    if not is_list or not all(isinstance(score, float) for score in scores):
        raise UnusableModel(f"{file.path} has a tokenizer without a score for each token")
    found: list[float] = scores
    return found


def _merge_pairs(text: str, pieces: dict[str, int]) -> list[list[str]]:
    """The ways to put a token together from two others."""
    cuts = ((text[:end], text[end:]) for end in range(1, len(text)))
    found = [(left, right) for left, right in cuts if left in pieces and right in pieces]
    return [
        list(pair) for pair in sorted(found, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    ]


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
            f"the tokenizer of {file.path} is of the kind {kind!r:.60}; "
            f"{', '.join(_PARTS_BY_MODEL)} are "
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
