"""Rebuilds tokenizer.json from the metadata of a GGUF file.

Two families are supported: byte-level BPE (GPT-2 and most later models), of which a file names the
pre-tokenizer, and SentencePiece BPE (Llama 2), whose merges are derived from token scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

#: Words with a leading space, punctuation, line breaks; %s limits the length of groups of digits.
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreTokenizer:
    """How text is split into words before BPE merges bytes within them."""

    parts: tuple[Mapping[str, object], ...]
    normalizer: Mapping[str, object] | None = None
    ignores_merges: bool = False
    """Whether a word that is itself a token is used without merging."""
    adds_bos: bool = False
    """Whether texts begin with BOS, if the file does not specify it."""


def _byte_level(*, use_regex: bool) -> dict[str, object]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> dict[str, object]:
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


def byte_level_bpe_parts(file: GgufFile, vocab: GgufVocab) -> dict[str, object]:
    """The parts of tokenizer.json that are specific to byte-level BPE."""
    name = file.metadata.get("tokenizer.ggml.pre")
    pre_tokenizer = PRE_TOKENIZERS.get(str(name))
    if pre_tokenizer is None:
        raise UnsupportedTokenizer(
            f"the tokenizer of {file.path} uses the pre-tokenizer {name!r:.60}, which is not "
            f"supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    adds_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", pre_tokenizer.adds_bos))
    bos_token = special_tokens(file).get("bos_token") if adds_bos else None
    return {
        "normalizer": pre_tokenizer.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre_tokenizer.parts)},
        "post_processor": vocab.bos_post_processor(bos_token) or _byte_level(use_regex=True),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "ignore_merges": pre_tokenizer.ignores_merges,
            "vocab": vocab.vocab,
            "merges": _read_merges(file, vocab),
        },
    }


def _read_merges(file: GgufFile, vocab: GgufVocab) -> list[list[str]]:
    merges = [merge.split(" ") for merge in read_strings(file, "merges")]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.vocab.keys():
            raise UnusableModel(f"{file.path} has an invalid merge {' '.join(merge)!r:.60}")
    return merges


#: Stands for a space.
SPACE_SYMBOL = "\u2581"


def sentencepiece_parts(file: GgufFile, vocab: GgufVocab) -> dict[str, object]:
    """The parts of tokenizer.json that are specific to SentencePiece BPE."""
    options = {
        name: file.metadata.get(f"tokenizer.ggml.{name}", default)
        for name, default in (
            ("add_space_prefix", True),
            ("add_bos_token", True),
            ("remove_extra_whitespaces", False),
            ("precompiled_charsmap", None),
        )
    }
    if options["remove_extra_whitespaces"] or options["precompiled_charsmap"]:
        raise UnsupportedTokenizer(
            f"the tokenizer of {file.path} normalizes text in a way that is not supported"
        )
    prefix, strip = [], []
    if options["add_space_prefix"]:
        prefix = [{"type": "Prepend", "prepend": SPACE_SYMBOL}]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    bos_token = special_tokens(file).get("bos_token") if options["add_bos_token"] else None
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prefix, _replace_rule(" ", SPACE_SYMBOL)],
        },
        "pre_tokenizer": None,
        "post_processor": vocab.bos_post_processor(bos_token),
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


def _replace_rule(old: str, new: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _unknown_token(vocab: GgufVocab) -> str | None:
    pairs = zip(vocab.texts, vocab.token_types, strict=True)
    return next((text for text, kind in pairs if kind == UNKNOWN), None)


def _derive_merges(file: GgufFile, vocab: GgufVocab) -> list[list[str]]:
    scores = _read_scores(file, len(vocab.texts))
    pieces = {
        text: token for text, token in vocab.vocab.items() if vocab.token_types[token] == NORMAL
    }
    # Equal scores are ordered by token id.
    ranked = sorted(pieces, key=lambda text: (-scores[pieces[text]], pieces[text]))
    return [pair for text in ranked for pair in _merge_pairs(text, pieces)]


def _read_scores(file: GgufFile, count: int) -> list[float]:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != count:
        raise UnusableModel(f"{file.path} has a tokenizer without a score for each token")
    if not all(isinstance(score, float) for score in scores):
        raise UnusableModel(f"{file.path} has a tokenizer with scores that are not numbers")
    return scores


def _merge_pairs(text: str, pieces: dict[str, int]) -> list[list[str]]:
    """All ways to compose a token from two others."""
    splits = ((text[:end], text[end:]) for end in range(1, len(text)))
    pairs = [(left, right) for left, right in splits if left in pieces and right in pieces]
    return [
        list(pair) for pair in sorted(pairs, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    ]


_PARTS_BY_MODEL: Mapping[str, Callable[[GgufFile, GgufVocab], dict[str, object]]] = {
    "gpt2": byte_level_bpe_parts,
    "llama": sentencepiece_parts,
}


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """The tokenizer's files; raises UnsupportedTokenizer if it cannot be rebuilt exactly."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise UnsupportedTokenizer(f"{file.path} has no tokenizer")
    if not isinstance(kind, str) or kind not in _PARTS_BY_MODEL:
        raise UnsupportedTokenizer(
            f"the tokenizer of {file.path} is of type {kind!r:.60}; "
            f"supported are {', '.join(_PARTS_BY_MODEL)}"
        )
    vocab = read_vocab(file)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocab.added_tokens(),
        **_PARTS_BY_MODEL[kind](file, vocab),
    }
    return {
        "tokenizer.json": to_json(content),
        "tokenizer_config.json": to_json(_tokenizer_config(file)),
    }


def _tokenizer_config(file: GgufFile) -> dict[str, object]:
    """The settings that tokenizer.json does not hold."""
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_tokens(file),
    }
    arch = file.metadata.get("general.architecture")
    if isinstance(limit := file.metadata.get(f"{arch}.context_length"), int):
        config["model_max_length"] = limit
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return config


def to_json(content: Mapping[str, object]) -> bytes:
    """Encode as indented JSON."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
