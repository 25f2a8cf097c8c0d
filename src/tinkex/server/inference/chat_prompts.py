"""Prompts of conversations, and parsers of the answers to them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from tinkex.data.rendering import Renderer
from tinkex.engine.protocol import BaseModel
from tinkex.errors import InvalidInput
from tinkex.server.http.request_context import Services
from tinkex.server.inference.answer_parser import AnswerParser
from tinkex.server.inference.chat_request import ChatRequest
from tinkex.server.inference.error_bodies import context_exceeded, invalid_value
from tinkex.server.inference.model_names import ModelSource
from tinkex.server.inference.token_texts import TokenTexts
from tinkex.text import Tokenizer

#: Longer prompts, in characters per token of context, are refused before they are tokenized.
MAX_CHARS_PER_TOKEN = 256
_MAX_TOKENIZERS = 32


def texts_of(tokenizer: Tokenizer) -> TokenTexts:
    """Return the texts of the tokens of a tokenizer, which are found once."""
    return _cached_texts(cast("Hashable", tokenizer))


@lru_cache(maxsize=_MAX_TOKENIZERS)
def _cached_texts(tokenizer: Hashable) -> TokenTexts:
    return TokenTexts(cast("Tokenizer", tokenizer))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation."""

    tokens: Sequence[int]
    texts: TokenTexts

    def new_parser(self, stops: Sequence[str]) -> AnswerParser:
        """Return a parser of one answer."""
        return AnswerParser(self.texts, stops, context=self.tokens)


async def render_chat_prompt(
    services: Services, tenant_id: str, source: ModelSource, request: ChatRequest
) -> ChatPrompt:
    """Render a conversation with the chat template of its base model, on a thread."""
    check_text_length(source.base, _count_chars(request))
    return await services.text_threads.run(tenant_id, lambda: _render(services, source, request))


def _render(services: Services, source: ModelSource, request: ChatRequest) -> ChatPrompt:
    tokenizer = services.load_tokenizer(source.base)
    try:
        tokens = Renderer(tokenizer).render_prompt(tuple(request.messages))
    except InvalidInput as error:
        raise invalid_value("messages", error.message) from None
    return ChatPrompt(tokens=tokens, texts=texts_of(tokenizer))


def _count_chars(request: ChatRequest) -> int:
    return sum(len(str(message.get("content") or "")) for message in request.messages)


def check_text_length(base: BaseModel, num_chars: int) -> None:
    """Raise if a text is certainly longer than the context, before time is spent on it."""
    most = MAX_CHARS_PER_TOKEN * base.max_context_tokens
    if num_chars > most:
        raise context_exceeded(num_chars // MAX_CHARS_PER_TOKEN, base.max_context_tokens)
