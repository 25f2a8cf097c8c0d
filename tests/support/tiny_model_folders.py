"""Model folders with tiny weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import VOCAB_SIZE, tiny_qwen3

END = "<|end|>"
END_TOKEN = 2


def save_tiny(directory: Path, **overrides: Any) -> Path:
    """Save a tiny Qwen3 with a byte-level tokenizer; `overrides` are fields of its config."""
    tiny_qwen3(**overrides).save_pretrained(directory)
    save_tokenizer(directory, overrides.get("vocab_size", VOCAB_SIZE))
    return directory


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Save a tokenizer whose tokens are single bytes; those beyond the vocabulary are unknown."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<pad>", END, *letters][:vocab_size]
    model = models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<pad>", unk_token="<unk>"
    )
    wrapped.save_pretrained(directory)
