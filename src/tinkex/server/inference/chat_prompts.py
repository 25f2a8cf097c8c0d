"""Prompts of conversations, and readers of the answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinkex.data.rendering import Renderer
from tinkex.engine.protocol import BaseModel
from tinkex.errors import InvalidInput
from tinkex.server.http.request_context import Services
from tinkex.server.inference.answer_events import AnswerEvent, TextDelta
from tinkex.server.inference.chat_request import ChatRequest
from tinkex.server.inference.error_bodies import context_exceeded, invalid_value
from tinkex.server.inference.model_names import ModelSource
from tinkex.text import Tokenizer

#: Longer prompts, in characters per token of context, are refused before they are tokenized.
MAX_CHARS_PER_TOKEN = 256


class AnswerReader:
    """Reads one answer."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.stop_text: str | None = None
        self.has_tool_calls = False
        self.num_reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._stops = stops
        self._tokens: list[int] = []

    def feed(self, tokens: Sequence[int]) -> list[AnswerEvent]:
        """Add the next tokens; returns the parts of the answer that will not change any more."""
        self._tokens.extend(tokens)
        return []

    def finish(self) -> list[AnswerEvent]:
        """End the answer; returns what was held back."""
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, self.stop_text = min(found)
            text = text[:end]
        return [TextDelta(text)] if text else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation."""

    tokens: Sequence[int]
    tokenizer: Tokenizer

    def new_reader(self, stops: Sequence[str]) -> AnswerReader:
        """Return a reader of one answer."""
        return AnswerReader(self.tokenizer, stops)


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
    return ChatPrompt(tokens=tokens, tokenizer=tokenizer)


def _count_chars(request: ChatRequest) -> int:
    return sum(len(str(message.get("content") or "")) for message in request.messages)


def check_text_length(base: BaseModel, num_chars: int) -> None:
    """Raise if a text is certainly longer than the context, before time is spent on it."""
    most = MAX_CHARS_PER_TOKEN * base.max_context_tokens
    if num_chars > most:
        raise context_exceeded(num_chars // MAX_CHARS_PER_TOKEN, base.max_context_tokens)
