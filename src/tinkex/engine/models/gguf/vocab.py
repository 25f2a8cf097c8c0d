"""Reads the vocabulary of a GGUF file: token texts, token types and special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinkex.engine.models.gguf.reader import GgufFile
from tinkex.engine.models.weight_files import UnusableModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


class UnsupportedTokenizer(UnusableModel):
    """The tokenizer cannot be rebuilt exactly; the weights can still be used."""


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """All tokens, by id."""

    texts: list[str]
    token_types: list[int]
    vocab: Mapping[str, int]
    """Ids by text; without unused tokens, which only pad the embedding."""

    def added_tokens(self) -> list[dict[str, object]]:
        """The `added_tokens` of tokenizer.json: matched before the text is normalized."""
        special = (CONTROL, UNKNOWN)
        return [
            {"id": token, "content": text, **_FLAGS, "special": kind in special}
            for token, (text, kind) in enumerate(zip(self.texts, self.token_types, strict=True))
            if kind in (*special, USER_DEFINED)
        ]

    def bos_post_processor(self, bos_token: str | None) -> dict[str, object] | None:
        """A post-processor that prepends the BOS token; None if the vocabulary has none."""
        if bos_token is None or bos_token not in self.vocab:
            return None
        begin = {"SpecialToken": {"id": bos_token, "type_id": 0}}
        one, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        entry = {"id": bos_token, "ids": [self.vocab[bos_token]], "tokens": [bos_token]}
        return {
            "type": "TemplateProcessing",
            "single": [begin, one],
            "pair": [begin, one, begin, other],
            "special_tokens": {bos_token: entry},
        }


def read_vocab(file: GgufFile) -> GgufVocab:
    """Read the vocabulary; raises UnusableModel if it is inconsistent."""
    texts = read_strings(file, "tokens")
    token_types = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(texts)
    if not isinstance(token_types, list) or len(token_types) != len(texts):
        raise UnusableModel(f"{file.path} has {len(texts)} tokens, but not one type for each")
    used = [(text, token) for token, text in enumerate(texts) if token_types[token] != UNUSED]
    vocab = dict(used)
    if len(vocab) != len(used):
        raise UnusableModel(f"{file.path} has a token twice, so its tokenizer is ambiguous")
    return GgufVocab(texts, token_types, vocab)


def read_strings(file: GgufFile, key: str) -> list[str]:
    """Read a required list of strings of the tokenizer."""
    texts = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UnusableModel(f"{file.path} has a tokenizer without {key}")
    return texts


def special_tokens(file: GgufFile) -> dict[str, str]:
    """The texts of the special tokens, by their transformers names."""
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
    }
    texts = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, list):
        return {}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}
    # Padding a batch needs a token; EOS is the usual fallback.
    ids["pad_token"] = ids["eos_token"] if ids["pad_token"] is None else ids["pad_token"]
    return {
        name: str(texts[token])
        for name, token in ids.items()
        if isinstance(token, int) and 0 <= token < len(texts)
    }


def special_token_ids(file: GgufFile) -> dict[str, object]:
    """The special token ids for config.json and generation_config.json."""
    metadata = file.metadata
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    eos_ids = list(dict.fromkeys(token for token in named if isinstance(token, int)))
    ids = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "pad_token_id": metadata.get(
            "tokenizer.ggml.padding_token_id", eos_ids[0] if eos_ids else None
        ),
    }
    return {name: token for name, token in ids.items() if token not in (None, [])}
