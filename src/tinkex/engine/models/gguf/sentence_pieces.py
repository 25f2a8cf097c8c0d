"""Tokenizers of SentencePiece that merge letters, as those of Llama 2 and Mistral.

Such a file has a score for each token and no merges: two neighbours become the token with the best
score that they spell together. The merges are every such pair, the best score first.
"""

from __future__ import annotations

from typing import Any

from tinkex.engine.models.gguf.reading import GgufFile
from tinkex.engine.models.gguf.tokens import (
    NORMAL,
    UNKNOWN,
    GgufVocab,
    UnsupportedTokenizer,
    special_tokens,
)
from tinkex.engine.models.weight_files import UnusableModel

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
