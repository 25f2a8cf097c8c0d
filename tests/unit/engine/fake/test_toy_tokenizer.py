"""The toy tokenizer, and the import cost of the package."""

from __future__ import annotations

import pytest

from tinkex.engine.fake.toy_tokenizer import toy_tokenizer
from tinkex.errors import InvalidInput


def test_toy_tokenizer_round_trip() -> None:
    tokenizer = toy_tokenizer()
    tokens = tokenizer.encode("héllo", add_special_tokens=True)
    assert tokens == [*"héllo".encode(), 256]
    assert tokenizer.decode(tokens) == "héllo<eos>"
    assert tokenizer.decode([*tokens, 300], skip_special_tokens=True) == "héllo"
    assert tokenizer.decode([0xFF]) == "�"
    assert len(tokenizer) == tokenizer.vocab_size == 512
    with pytest.raises(InvalidInput, match="encode takes a string, got 3"):
        tokenizer.encode(3)  # type: ignore[arg-type]
