"""A tokenizer without files: each byte is a token, and 256 is EOS."""

from __future__ import annotations

from collections.abc import Iterable

from tinkex.errors import InvalidInput

EOS_TOKEN = 256
VOCAB_SIZE = 512


class ToyTokenizer:
    """UTF-8 bytes as token ids; ids 257 to 511 exist in the model but have no text."""

    name_or_path = "tinkex/toy-bytes"
    eos_token_id = EOS_TOKEN
    eos_token = "<eos>"
    vocab_size = VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode text as bytes, followed by EOS with `add_special_tokens`."""
        if not isinstance(text, str):
            raise InvalidInput(f"encode takes a string, got {text!r:.80}")
        tokens = list(text.encode())
        return [*tokens, EOS_TOKEN] if add_special_tokens else tokens

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Decode tokens; invalid UTF-8 becomes the replacement character."""
        eos = b"" if skip_special_tokens else self.eos_token.encode()
        parts = (eos if token == EOS_TOKEN else token_bytes(token) for token in tokens)
        return b"".join(parts).decode(errors="replace")

    def __len__(self) -> int:
        return VOCAB_SIZE


def token_bytes(token: int) -> bytes:
    """The byte of a token; empty for ids that are not bytes."""
    return bytes((token,)) if 0 <= token < 256 else b""


def toy_tokenizer() -> ToyTokenizer:
    """The tokenizer of the models that the stub server serves."""
    return ToyTokenizer()
