"""A tokenizer trained with SentencePiece, and its GGUF metadata."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import sentencepiece

from tinkex.engine.models.gguf.reader import GgufFile

LINES = (
    "the quick brown fox jumps over the lazy dog",
    "then they thought that there was nothing there",
    "naïve cafés serve crème brûlée, don't they?",
    "x = (1 + 22) * 333 - 4444",
)


def trained() -> Any:
    """Train a tokenizer with the settings of Llama 2 on a few lines."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4),
        model_writer=made,
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())


THEIRS = trained()


def vocabulary(**changes: Any) -> GgufFile:
    """The GGUF metadata of the tokenizer."""
    ids = range(THEIRS.get_piece_size())

    def kind(token: int) -> int:
        if THEIRS.is_unknown(token):
            return 2
        if THEIRS.is_control(token):
            return 3
        return 6 if THEIRS.is_byte(token) else 1

    facts = {
        "model": "llama",
        "tokens": [THEIRS.id_to_piece(token) for token in ids],
        "scores": [THEIRS.get_score(token) for token in ids],
        "token_type": [kind(token) for token in ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": False,
    }
    facts |= changes
    named = {f"tokenizer.ggml.{name}": x for name, x in facts.items() if x is not None}
    return GgufFile(path=Path("a.gguf"), metadata=named, tensors={})
