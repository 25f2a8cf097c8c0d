"""Tokenizers that merge bytes, as GPT-2's and most since: how each cuts text before it merges.

A file only names the way in which text is cut. Every name below stands for a way that is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkex.engine.models.gguf.reading import GgufFile
from tinkex.engine.models.gguf.tokens import (
    GgufVocab,
    UnsupportedTokenizer,
    read_strings,
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
