"""Tokenizers: resolve the tokenizer of a model, load it once, and render chats."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from tinkex.errors import InvalidInput
from tinkex.installation import install_command

#: Name prefixes of gated models, and an open copy of their tokenizer.
MIRRORS: Mapping[str, str] = MappingProxyType(
    {"meta-llama/Llama-3": "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"}
)
#: Aliases of tokenizer ids.
ALIASES: Mapping[str, str] = MappingProxyType(
    {"moonshotai/Kimi-K2.5-Text-Only": "moonshotai/Kimi-K2.5"}
)
#: Tokenizers with custom code, which is trusted only at these revisions.
PINNED_REVISIONS: Mapping[str, str] = MappingProxyType(
    {
        "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
        "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
        "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
        "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
    }
)
#: Maximum number of cached tokenizers.
MAX_CACHED = 32
#: Timeout of the reachability check of the hub.
_HUB_SECONDS = 5.0

_LOCAL_PATH = re.compile(r"[/~\\]|\.\.?[/\\]|\.\.?$|[A-Za-z]:[/\\]")

Loader = Callable[[str], object]


@runtime_checkable
class Tokenizer(Protocol):
    """The tokenizer interface; tokenizers of transformers implement it."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...


def resolve_tokenizer_id(
    model_name: str,
    server_tokenizer_id: str | None = None,
    mirrors: Mapping[str, str] = MIRRORS,
) -> str:
    """Return the tokenizer id of a model: from the server, else derived from the model name."""
    if server_tokenizer_id:
        tokenizer_id = _without_revision(server_tokenizer_id)
        if tokenizer_id:
            return ALIASES.get(tokenizer_id, tokenizer_id)
    if not isinstance(model_name, str) or not _without_revision(model_name):
        raise InvalidInput(f"No tokenizer can be found for the model name {model_name!r}")
    if _is_local(model_name):
        return model_name
    name = _without_revision(model_name)
    for prefix, mirror in mirrors.items():
        if name.startswith(prefix):
            return mirror
    parts = name.split("/")
    if len(parts) == 3:
        name = "/".join(parts[:2])
    return ALIASES.get(name, name)


def _without_revision(name: str) -> str:
    return name if _is_local(name) else name.partition(":")[0]


def _is_local(name: str) -> bool:
    # In a folder's path, colons and slashes do not separate a revision.
    return _LOCAL_PATH.match(name) is not None or ("\0" not in name and Path(name).is_dir())


class _CacheEntry:
    """A cached tokenizer; the lock is held while it loads."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.tokenizer: Tokenizer | None = None


class _TokenizerCache:
    """LRU cache of tokenizers; a failed load leaves its entry empty."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._lock = Lock()
        self._entries: OrderedDict[object, _CacheEntry] = OrderedDict()

    def get(self, key: object, load: Callable[[], Tokenizer]) -> Tokenizer:
        """Return the tokenizer of `key`; `load` runs once, also with several threads."""
        with self._lock:
            entry = self._entries.setdefault(key, _CacheEntry())
            self._entries.move_to_end(key)
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        with entry.lock:
            if entry.tokenizer is None:
                entry.tokenizer = load()
            return entry.tokenizer


_CACHE = _TokenizerCache(MAX_CACHED)


def load_tokenizer(
    tokenizer_id: str,
    *,
    revision: str | None = None,
    loader: Loader | None = None,
    is_minimal: bool = False,
) -> Tokenizer:
    """Load a tokenizer by id or folder, once per process; blocks while loading.

    `loader` replaces transformers and receives only the id, so it excludes `revision`. A minimal
    tokenizer encodes, decodes and renders chats; it is loaded without transformers if possible.
    """
    if not isinstance(tokenizer_id, str) or not tokenizer_id:
        raise InvalidInput(f"A tokenizer id is a name such as Qwen/Qwen3-8B, got {tokenizer_id!r}")
    if loader is not None and revision is not None:
        raise InvalidInput(f"revision {revision!r} has no effect on a loader of your own")
    if loader is None and revision is None:
        revision = PINNED_REVISIONS.get(tokenizer_id)
    if loader is None:
        loader = partial(_load_pretrained, revision=revision, is_minimal=is_minimal)
        key: object = (tokenizer_id, revision, is_minimal)
    else:
        key = (tokenizer_id, loader)
    return _CACHE.get(key, lambda: _load(tokenizer_id, loader))


def _load(tokenizer_id: str, loader: Loader) -> Tokenizer:
    try:
        tokenizer = loader(tokenizer_id)
    except Exception as error:  # tokenizers raises Exception, a loader may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        message = f"Failed to load tokenizer {tokenizer_id!r}: {reason}"
        hint = (
            f"Run `{install_command('text')}`, go online once to fill the cache, or name a local "
            "folder that has a tokenizer.json."
        )
        raise InvalidInput(message, hint=hint) from error
    if not isinstance(tokenizer, Tokenizer):
        raise InvalidInput(
            f"Failed to load tokenizer {tokenizer_id!r}: "
            f"a {type(tokenizer).__name__} has no encode and decode"
        )
    return tokenizer


def _load_pretrained(tokenizer_id: str, *, revision: str | None, is_minimal: bool) -> object:
    source = tokenizer_id
    if _is_local(tokenizer_id):
        source = str(Path(tokenizer_id).expanduser())
        if not Path(source).is_dir():
            # transformers would treat the path as a hub name and retry the network for a minute.
            raise FileNotFoundError("there is no such folder")
    if revision is None and (Path(source) / "tokenizer.json").is_file():
        tokenizer = _load_folder(Path(source), is_minimal=is_minimal)
        if tokenizer is not None:
            return tokenizer
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        message = "transformers is not installed, and there is no local copy"
        raise FileNotFoundError(message) from error
    options: dict[str, object] = {}
    if revision is not None:
        # Code from the hub runs only at the pinned revision.
        is_pinned = PINNED_REVISIONS.get(tokenizer_id) == revision
        options = {"revision": revision, "trust_remote_code": is_pinned}
    if _is_local(tokenizer_id):
        return AutoTokenizer.from_pretrained(source, **options)
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True, **options)
    except (OSError, ValueError):
        _check_hub()
    return AutoTokenizer.from_pretrained(source, **options)


def _check_hub() -> None:
    """Fail at once if the hub is unreachable; transformers would retry for a minute."""
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        raise ConnectionError("it is not in the cache of Hugging Face, which is offline")
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:  # depends on the HTTP library of the hub's client
        raise ConnectionError(
            f"it is not in the cache of Hugging Face, and {constants.ENDPOINT} cannot be reached"
        ) from error


def _load_folder(folder: Path, *, is_minimal: bool) -> object | None:
    """Load a folder without AutoTokenizer, which imports torch; None if only it can load it."""
    from tinkex import file_tokenizer

    if is_minimal and (minimal := file_tokenizer.load_file_tokenizer(folder)):
        return minimal
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        loaded = file_tokenizer.load_file_tokenizer(folder)
        return loaded or file_tokenizer.load_without_template(folder)
    if file_tokenizer.has_generic_class(folder):
        tokenizer: object = PreTrainedTokenizerFast.from_pretrained(folder)
        return tokenizer
    return None


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text, by default with special tokens such as BOS."""
    if not isinstance(text, str):
        raise InvalidInput(f"Only text can be tokenized, got {text!r}")
    try:
        encoded = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"The text {_truncated_repr(text)} cannot be tokenized: {error}"
        ) from error
    return _to_token_ids(encoded)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the token ids of a conversation, rendered with the tokenizer's chat template."""
    options = {"tokenize": True, "return_dict": False}
    name = _tokenizer_name(tokenizer)
    options["add_generation_prompt"] = add_generation_prompt
    return _to_token_ids(_apply_chat_template(tokenizer, messages, name, options))


def get_chat_template(tokenizer: Tokenizer) -> str:
    """Return the text of a tokenizer's chat templates; empty if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if not hasattr(tokenizer, "apply_chat_template") or not template:
        return ""
    return "\n".join(template.values()) if isinstance(template, Mapping) else str(template)


def render_chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    name: str,
    tools: Sequence[Mapping[str, object]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, object] = MappingProxyType({}),
) -> str:
    """Return the text of a conversation, rendered with the tokenizer's chat template.

    `name` is that of the model in errors. `variables` are further variables of the template, and
    cannot replace the template or its messages.
    """
    reserved = _reserved_variables(tokenizer) & variables.keys()
    if reserved:
        raise InvalidInput(f"{min(reserved)!r} is not a variable of chat templates that can be set")
    options = {
        **variables,
        "tokenize": False,
        "tools": [dict(tool) for tool in tools] or None,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    return str(_apply_chat_template(tokenizer, messages, repr(name), options))


def _reserved_variables(tokenizer: Tokenizer) -> set[str]:
    """Names of arguments that decide how a template is rendered, such as the template itself."""
    apply = getattr(tokenizer, "apply_chat_template", None)
    names = {"messages", "conversations", "tools"}
    if apply is not None:
        names |= inspect.signature(apply).parameters.keys()
    return names - {"documents", "kwargs"}


def _apply_chat_template(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    name: str,
    options: Mapping[str, Any],
) -> object:
    _check_messages(messages)
    apply = getattr(tokenizer, "apply_chat_template", None)
    if apply is None or getattr(tokenizer, "chat_template", "") is None:
        raise InvalidInput(
            f"The tokenizer {name} has no chat template",
            hint="Use the tokenizer of an instruct model, or write the prompt as plain text.",
        )
    try:
        return apply([dict(message) for message in messages], **options)
    except Exception as error:  # a template may raise anything
        raise InvalidInput(
            f"The chat template of {name} refused the messages: {error!s:.500}"
        ) from error


def _check_messages(messages: Sequence[Mapping[str, object]]) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidInput(f"messages must be a list of messages, got {_truncated_repr(messages)}")
    if not messages:
        raise InvalidInput("messages must hold at least one message, got []")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(where: str, message: Mapping[str, object]) -> None:
    if not isinstance(message, Mapping):
        raise InvalidInput(
            f"{where} must have a role and a content, got {_truncated_repr(message)}"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidInput(
            f"{where} has no role such as 'user' or 'assistant': {_truncated_repr(message)}"
        )
    if content is None and message.get("tool_calls"):
        return
    if not isinstance(content, str | list):
        raise InvalidInput(
            f"{where} has no text or parts as its content: {_truncated_repr(message)}"
        )


def _to_token_ids(encoded: Any) -> list[int]:
    # tokenizers.Tokenizer returns an object with .ids, others return a mapping.
    ids = getattr(encoded, "ids", encoded)
    if isinstance(ids, Mapping):
        ids = ids["input_ids"]
    return [int(token) for token in ids]


def _tokenizer_name(tokenizer: object) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _truncated_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
