"""The bytes and text of single tokens, and incremental decoding of an answer's tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from tinkex.detokenizer import IncrementalDetokenizer
from tinkex.text import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
#: Sentencepiece's replacement for a space.
_METASPACE = "\u2581"


class TokenDecoder(Protocol):
    """Decodes tokens one after the other."""

    def push(self, token: int) -> str:
        """Add the next token; returns the text that will not change any more."""
        ...

    def flush(self) -> str:
        """Return the text that was held back."""
        ...


class TokenTexts:
    """The bytes and text of the tokens of one tokenizer; safe for use by several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added, self.special = _added_tokens(tokenizer)
        """All added tokens, and those that are not part of the text, with their texts."""
        self._is_byte_level = _is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, also if they are not complete characters."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def text_of(self, token: int) -> str:
        """Return the text of a single token; incomplete characters are replaced."""
        return self.bytes_of(token).decode(errors="replace")

    def new_decoder(self, context: Sequence[int] = ()) -> TokenDecoder:
        """Return a decoder of the tokens that follow `context`."""
        if self._is_byte_level:
            return _ByteDecoder(self)
        ordinary = [token for token in context[-16:] if token not in self.special]
        return IncrementalDetokenizer(_PlainDecoder(self._tokenizer), ordinary)

    def _find_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        piece = convert(token) if convert else None
        if not isinstance(piece, str):
            return _decode(self._tokenizer, [token]).encode()
        if self._is_byte_level:
            table = _byte_of_character()
            return b"".join(
                table.get(character, character.encode(errors="replace")) for character in piece
            )
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(match[1])
        if _METASPACE in piece:
            return piece.replace(_METASPACE, " ").encode()
        return _decode(self._tokenizer, [token]).encode()


class TextOffsets:
    """The positions in a text at which the texts of its tokens begin."""

    def __init__(self, texts: TokenTexts, context: Sequence[int] = ()) -> None:
        self._texts = texts
        self._decoder = texts.new_decoder(context)
        self._length = 0

    def push(self, token: int) -> int:
        """Add the next token; returns where it begins. Special tokens have no length."""
        offset = self._length
        is_special = token in self._texts.special
        self._length += len(self._decoder.flush() if is_special else self._decoder.push(token))
        return offset


class _ByteDecoder:
    """Decodes tokens that are byte strings, independent of each other."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._texts.bytes_of(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PlainDecoder:
    """Decodes without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], /) -> str:
        return _decode(self._tokenizer, token_ids)


def _decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def _added_tokens(tokenizer: Tokenizer) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Return all added tokens and the special ones among them, with their texts."""
    added = {
        int(token): str(entry)
        for token, entry in getattr(tokenizer, "added_tokens_decoder", {}).items()
    }
    special = {
        int(token): str(entry)
        for token, entry in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if getattr(entry, "special", False)
    }
    ids = [*getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "eos_token_id", None)]
    for token in ids:
        if isinstance(token, int) and token not in special:
            special[token] = added.get(token) or tokenizer.decode([token])
    return {**added, **special}, special


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the text of tokens is the concatenation of their bytes."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    return type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"


@cache
def _byte_of_character() -> Mapping[str, bytes]:
    """Return the byte of each character in the vocabulary of byte-level BPE.

    Printable characters of Latin-1 are themselves; the other bytes follow from code point 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    pairs = [*zip(printable, printable, strict=True), *zip(range(256, 512), others, strict=False)]
    return {chr(code): bytes((value,)) for code, value in pairs}
