"""Prompts of conversations, and parsers of the answers to them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, cast

from tinkex.engine.protocol import BaseModel
from tinkex.errors import InvalidInput
from tinkex.server.http.request_context import Services
from tinkex.server.inference.answer_parser import AnswerParser
from tinkex.server.inference.chat_format import ChatFormat, RenderedChat, ToolsUnsupported
from tinkex.server.inference.chat_request import ChatRequest, SamplingSettings
from tinkex.server.inference.error_bodies import (
    context_exceeded,
    invalid_value,
    unsupported_value,
)
from tinkex.server.inference.model_names import ModelSource
from tinkex.server.inference.token_texts import TokenTexts
from tinkex.text import Tokenizer

ReadRequest: TypeAlias = Callable[[], ChatRequest]
"""Converts a request of either family; takes a while for a large body."""

#: Longer prompts, in characters per token of context, are refused before they are tokenized.
MAX_CHARS_PER_TOKEN = 256
_MAX_TOKENIZERS = 32


def texts_of(tokenizer: Tokenizer) -> TokenTexts:
    """Return the texts of the tokens of a tokenizer, which are found once."""
    return _cached_texts(cast("Hashable", tokenizer))


@lru_cache(maxsize=_MAX_TOKENIZERS)
def _cached_texts(tokenizer: Hashable) -> TokenTexts:
    return TokenTexts(cast("Tokenizer", tokenizer))


@lru_cache(maxsize=_MAX_TOKENIZERS)
def _cached_format(tokenizer: Hashable, model: str, tool_parser: str | None) -> ChatFormat:
    return ChatFormat(model, cast("Tokenizer", tokenizer), tool_parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation."""

    request: ChatRequest
    chat_format: ChatFormat
    rendered: RenderedChat

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of the prompt."""
        return self.rendered.tokens

    @property
    def texts(self) -> TokenTexts:
        """The texts of the tokens of the model."""
        return self.chat_format.texts

    @property
    def sampling(self) -> SamplingSettings:
        """The settings of the request, and what else ends an answer."""
        return self.chat_format.extend_sampling(self.request, self.rendered)

    def new_parser(self) -> AnswerParser:
        """Return a parser of one answer."""
        return self.chat_format.new_parser(self.request, self.rendered)


async def render_chat_prompt(
    services: Services, tenant_id: str, source: ModelSource, read: ReadRequest
) -> ChatPrompt:
    """Read a request and render it with the chat template of its base model, on a thread."""
    return await services.text_threads.run(tenant_id, lambda: _render(services, source, read()))


def _render(services: Services, source: ModelSource, request: ChatRequest) -> ChatPrompt:
    base = source.base
    check_text_length(base, _count_chars(request))
    try:
        tokenizer = cast("Hashable", services.load_tokenizer(base))
        tool_parser = services.config.tool_parsers.get(base.name)
        chat_format = _cached_format(tokenizer, base.name, tool_parser)
        rendered = chat_format.render(request)
    except ToolsUnsupported as error:
        raise unsupported_value("tools", error.message) from None
    except InvalidInput as error:
        raise invalid_value("messages", error.message) from None
    return ChatPrompt(request=request, chat_format=chat_format, rendered=rendered)


def _count_chars(request: ChatRequest) -> int:
    return len(str(request.tools)) + sum(len(str(message)) for message in request.messages)


def check_text_length(base: BaseModel, num_chars: int, param: str = "messages") -> None:
    """Raise if a text is certainly longer than the context, before time is spent on it."""
    most = MAX_CHARS_PER_TOKEN * base.max_context_tokens
    if num_chars > most:
        num_tokens = num_chars // MAX_CHARS_PER_TOKEN
        raise context_exceeded(num_tokens, base.max_context_tokens, param)
