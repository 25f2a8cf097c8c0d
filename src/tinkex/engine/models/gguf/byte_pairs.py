"""Tokenizers that merge bytes, as GPT-2's and most since: how each cuts text before it merges.

A file only names the way in which text is cut. Every name below stands for a way that is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkex.engine.models.gguf.reading import Gguf
from tinkex.engine.models.gguf.tokens import Tokens, UnknownTokenizer, read_texts, special_tokens
from tinkex.engine.models.weight_files import UnusableModel

#: Words with the blank before them, signs, line ends; digits in groups of at most so many.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cutting:
    """How text is cut into words before bytes are merged within them."""

    parts: tuple[Mapping[str, Any], ...]
    normalizer: Mapping[str, Any] | None = None
    ignores_merges: bool = False
    """Whether a word that is a token as a whole is taken so."""
    begins: bool = False
    """Whether a text begins with the first token, if the file does not say."""


def _byte_level(*, cuts: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": cuts,
    }


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


_GPT2 = _Cutting(parts=(_byte_level(cuts=True),))
_DIGITS = _Cutting(parts=({"type": "Digits", "individual_digits": True}, _byte_level(cuts=True)))
_QWEN = _Cutting(parts=(_split(_WORDS % ""), _byte_level(cuts=False)), normalizer={"type": "NFC"})
_LLAMA3 = _Cutting(
    parts=(_split(_WORDS % "{1,3}"), _byte_level(cuts=False)), ignores_merges=True, begins=True
)
CUTTINGS = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "qwen2": _QWEN,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def byte_pair_parts(file: Gguf, tokens: Tokens) -> dict[str, Any]:
    """The parts of tokenizer.json that are particular to such a tokenizer."""
    name = file.facts.get("tokenizer.ggml.pre")
    cutting = CUTTINGS.get(str(name))
    if cutting is None:
        raise UnknownTokenizer(
            f"the tokenizer of {file.path} cuts text as {name!r:.60} does, which is not known; "
            f"known are {', '.join(CUTTINGS)}"
        )
    adds_first = bool(file.facts.get("tokenizer.ggml.add_bos_token", cutting.begins))
    first = special_tokens(file).get("bos_token") if adds_first else None
    return {
        "normalizer": cutting.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(cutting.parts)},
        "post_processor": tokens.beginning(first) or _byte_level(cuts=True),
        "decoder": _byte_level(cuts=True),
        "model": {
            "type": "BPE",
            "ignore_merges": cutting.ignores_merges,
            "vocab": tokens.vocab,
            "merges": _merges(file, tokens),
        },
    }


def _merges(file: Gguf, tokens: Tokens) -> list[list[str]]:
    merges = [merge.split(" ") for merge in read_texts(file, "merges")]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= tokens.vocab.keys():
            raise UnusableModel(f"{file.path} merges {' '.join(merge)!r:.60}, which it cannot")
    return merges
