"""A tokenizer loaded from its files with `tokenizers` alone; transformers takes a second to import.

Only folders are accepted for which transformers would compute the same token ids and texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

if TYPE_CHECKING:
    from jinja2 import Template

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
#: Classes of transformers that take everything from tokenizer.json.
GENERIC_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
#: Model types for which AutoTokenizer takes these classes.
_GENERIC_MODEL_TYPES = frozenset({"", "llama", "qwen3"})
#: Named special tokens, in the order of transformers.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
#: Settings with which a tokenizer behaves as its tokenizer.json describes.
_KNOWN_SETTINGS = frozenset(
    {
        *_SPECIAL_TOKENS,
        *("add_bos_token", "add_eos_token", "add_prefix_space", "chat_template"),
        *("clean_up_tokenization_spaces", "model_max_length", "tokenizer_class"),
    }
)
_MUST_BE_FALSE = ("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces")
#: Files from which transformers takes more tokens or templates.
_OTHER_FILES = (
    "added_tokens.json",
    "additional_chat_templates",
    "chat_template.json",
    "special_tokens_map.json",
)
#: transformers repairs the patterns of some larger vocabularies.
_MAX_VOCAB_SIZE = 100_000


class FileTokenizer:
    """The tokenizer of a folder; its methods are a part of those of transformers."""

    def __init__(
        self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = template
        self.special_tokens_map = {
            name: str(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None
        }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ids = list(token_ids)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
    ) -> list[int] | str:
        """Return the token ids or the text of a conversation; `return_dict` is not supported."""
        assert not return_dict
        text = self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens_map,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def bos_token_id(self) -> int | None:
        """The id of the BOS token; None without one."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the EOS token; None without one."""
        return self._id_of("eos_token")

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the named special tokens."""
        ids = map(self._id_of, self.special_tokens_map)
        return list(dict.fromkeys(token for token in ids if token is not None))

    @cached_property
    def _template(self) -> Template:
        from tinkex.chat_template import compile_template

        return compile_template(self.chat_template or "")

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        return None if text is None else self.backend_tokenizer.token_to_id(text)


def load_file_tokenizer(folder: Path) -> FileTokenizer | None:
    """Load the tokenizer of a folder; None if only transformers loads it exactly."""
    config = _read_json(folder / CONFIG_FILE)
    template = _read_template(folder, config)
    if not has_generic_class(folder) or not _is_plain(folder, config, template):
        return None
    backend = _read_backend(folder)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = {str(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
    if not named <= added or backend.get_vocab_size() > _MAX_VOCAB_SIZE:
        return None
    backend.no_truncation()
    backend.no_padding()
    if backend.post_processor is None or {"add_bos_token", "add_eos_token"} & config.keys():
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A:0", pair="$A:0 $B:1", special_tokens=[]
        )
    return FileTokenizer(backend, config, template)


def load_without_template(folder: Path) -> FileTokenizer:
    """Load tokenizer.json alone."""
    return FileTokenizer(_read_backend(folder), {}, None)


def has_generic_class(folder: Path) -> bool:
    """Whether AutoTokenizer would load a folder with transformers' generic class."""
    if not (folder / TOKENIZER_FILE).is_file():
        return False
    config, model = _read_json(folder / CONFIG_FILE), _read_json(folder / "config.json")
    return (
        config.get("tokenizer_class") in GENERIC_CLASSES
        and "auto_map" not in config
        and model.get("model_type", "") in _GENERIC_MODEL_TYPES
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if missing or damaged, which transformers reports."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE))


def _read_template(folder: Path, config: Mapping[str, Any]) -> Any:
    try:
        return (folder / TEMPLATE_FILE).read_text("utf-8")
    except FileNotFoundError:
        return config.get("chat_template")


def _is_plain(folder: Path, config: Mapping[str, Any], template: Any) -> bool:
    """Whether nothing besides tokenizer.json changes the tokens."""
    return (
        config.keys() <= _KNOWN_SETTINGS
        and not any(config.get(name) for name in _MUST_BE_FALSE)
        and all(isinstance(config.get(name), str | None) for name in _SPECIAL_TOKENS)
        and isinstance(template, str | None)
        # A tag of transformers.
        and "endgeneration" not in (template or "")
        and not any((folder / name).exists() for name in _OTHER_FILES)
    )
