"""Reads the vocabulary of a GGUF file and rebuilds tokenizer.json from it.

Two families are supported: byte-level BPE (GPT-2 and most later models), of which a file names the
pre-tokenizer, and SentencePiece BPE (Llama 2), whose merges are derived from token scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tinkex.engine.models.gguf.reader import GgufFile
from tinkex.engine.models.weight_files import UnusableModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
#: Words with a leading space, punctuation, line breaks; %s limits the length of groups of digits.
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# --- the vocabulary ------------------------------------------------------------------------------


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


# --- tokenizer.json ------------------------------------------------------------------------------


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
