"""The tokens of a GGUF file: their texts and kinds, and what every tokenizer.json says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkex.engine.models.gguf.reader import GgufFile
from tinkex.engine.models.weight_files import UnusableModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


class UnsupportedTokenizer(UnusableModel):
    """A tokenizer of a kind that cannot be rebuilt exactly; the weights are of use all the same."""


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """Every token, by its id."""

    texts: list[str]
    token_types: list[int]
    vocab: Mapping[str, int]
    """The ids of those that stand for something; others only fill the embedding up."""

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before anything else is done to it."""
        special = (CONTROL, UNKNOWN)
        return [
            {"id": token, "content": text, **_FLAGS, "special": kind in special}
            for token, (text, kind) in enumerate(zip(self.texts, self.token_types, strict=True))
            if kind in (*special, USER_DEFINED)
        ]

    def bos_post_processor(self, bos_token: str | None) -> dict[str, Any] | None:
        """What puts a token in front of every text; None if there is none to put."""
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
    """The tokens of a file; raises if they make no sense."""
    texts = read_strings(file, "tokens")
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(texts)
    if not isinstance(kinds, list) or len(kinds) != len(texts):
        raise UnusableModel(f"{file.path} has {len(texts)} tokens and not as many kinds of them")
    used = [(text, token) for token, text in enumerate(texts) if kinds[token] != UNUSED]
    vocab = dict(used)
    if len(vocab) != len(used):
        raise UnusableModel(f"{file.path} has a token twice, so its tokenizer is ambiguous")
    return GgufVocab(texts, kinds, vocab)


def read_strings(file: GgufFile, key: str) -> list[str]:
    """A list of texts that the tokenizer of a file has to have."""
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise UnusableModel(f"{file.path} has a tokenizer without {key}")
    return found


def special_tokens(file: GgufFile) -> dict[str, str]:
    """The tokens that begin, end and fill texts, by the names of transformers."""
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
    }
    texts = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, list):
        return {}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{fact}") for name, fact in names.items()}
    # A batch cannot be filled without: the end is what everybody takes then.
    ids["pad_token"] = ids["eos_token"] if ids["pad_token"] is None else ids["pad_token"]
    return {
        name: str(texts[token])
        for name, token in ids.items()
        if isinstance(token, int) and 0 <= token < len(texts)
    }


def special_token_ids(file: GgufFile) -> dict[str, Any]:
    """What config.json and generation_config.json say of tokens with a meaning."""
    facts = file.metadata
    named = (facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(token for token in named if isinstance(token, int)))
    found = {
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id", ends[0] if ends else None),
    }
    return {name: token for name, token in found.items() if token not in (None, [])}
