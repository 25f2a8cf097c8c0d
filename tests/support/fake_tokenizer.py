"""A tokenizer without a vocabulary."""

from __future__ import annotations

from typing import Any


class FakeTokenizer:
    """Encodes a text as its lengths; optionally has a chat template."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template
        self.seen: list[dict[str, Any]] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [7] * add_special_tokens + [len(word) for word in text.split()]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return " ".join("x" * token for token in token_ids)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        self.seen.append(options)
        if any(message["role"] == "forbidden" for message in messages):
            raise RuntimeError("roles must alternate")
        return [len(message["content"] or "") for message in messages]
