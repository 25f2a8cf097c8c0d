"""Rows as tokens: the model's own chat template, and which tokens are learned.

A conversation is laid out by the tokenizer's chat template. A tokenizer without one gets a plain
layout: every message is "Role: content" and an empty line, and what the assistant says is followed
by the end-of-text token if there is one. Prompt and completion are plain text in any case.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkex.data.layouts import Messages
from tinkex.data.rows import ChatRow, PreferenceRow, Prompt, PromptCompletionRow
from tinkex.errors import InvalidInput
from tinkex.text import Tokenizer, encode, render_chat
from tinkex.types import Datum, ModelInput


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """Tokens, and which of them are learned."""

    tokens: Sequence[int]
    is_learned: Sequence[bool]
    num_truncated: int = 0
    """How many tokens at the end did not fit."""

    @property
    def num_learned(self) -> int:
        """How many tokens are learned; the first cannot be, for nothing predicts it."""
        return sum(self.is_learned[1:])

    @property
    def model_input(self) -> ModelInput:
        """All tokens, for scoring."""
        return ModelInput.from_ints(self.tokens)

    def to_datum(self, weight: float = 1.0) -> Datum:
        """For cross entropy: position i predicts token i + 1, with this weight if it is learned."""
        return Datum(
            model_input=ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": list(self.tokens[1:]),
                "weights": [weight if is_learned else 0.0 for is_learned in self.is_learned[1:]],
            },
        )

    def sum_target_logprobs(self, logprobs: Sequence[float]) -> float:
        """The log-probability of all that is learned, from those of the targets."""
        return sum(itertools.compress(logprobs, self.is_learned[1:]))


@dataclass(frozen=True, slots=True)
class Renderer:
    """Turns rows into examples for one model."""

    tokenizer: Tokenizer
    max_tokens: int | None = None
    """Examples are cut to this length."""
    has_template: bool = field(init=False)

    def __post_init__(self) -> None:
        template = getattr(self.tokenizer, "chat_template", None)
        has_template = bool(template) and hasattr(self.tokenizer, "apply_chat_template")
        object.__setattr__(self, "has_template", has_template)

    def render_examples(self, row: ChatRow | PromptCompletionRow) -> list[RenderedExample]:
        """What a row teaches: one example, or one per turn if the template rewrites old turns."""
        if isinstance(row, PromptCompletionRow):
            found = [self._render_answer(row.prompt, row.completion)]
        elif self.has_template:
            found = self._render_with_template(row.messages)
        else:
            found = [self._render_plain(row.messages)]
        return [self._truncate(example) for example in found]

    def render_pair(self, row: PreferenceRow) -> tuple[RenderedExample, RenderedExample]:
        """The chosen and the rejected answer, each behind the prompt."""
        chosen, rejected = (
            self._truncate(self._render_answer(row.prompt, answer))
            for answer in (row.chosen, row.rejected)
        )
        return chosen, rejected

    def render_prompt(self, prompt: Prompt) -> list[int]:
        """The tokens after which the model is to answer."""
        if isinstance(prompt, str):
            return [*self._bos(), *self._encode(prompt)]
        if self.has_template:
            return render_chat(self.tokenizer, prompt, add_generation_prompt=True)
        return [*self._render_plain(prompt).tokens, *self._encode("Assistant:")]

    def decode(self, tokens: Sequence[int]) -> str:
        """What the model said."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _render_answer(self, prompt: Prompt, answer: str) -> RenderedExample:
        if not isinstance(prompt, str):
            message = {"role": "assistant", "content": answer}
            if not self.has_template:
                return _learn_last_only(
                    self._render_plain(prompt), self._render_plain((*prompt, message))
                )
            start = render_chat(self.tokenizer, prompt, add_generation_prompt=True)
            whole = render_chat(self.tokenizer, (*prompt, message), add_generation_prompt=False)
            return _from_spans(whole, [(_common_prefix_length(start, whole), len(whole))])
        # Apart, so that the same tokens are learned that sampling after the prompt would bring.
        start = self.render_prompt(prompt)
        whole = [*start, *self._encode(answer), *self._eos()]
        return _from_spans(whole, [(len(start), len(whole))])

    def _render_with_template(self, messages: Messages) -> list[RenderedExample]:
        whole = render_chat(self.tokenizer, messages, add_generation_prompt=False)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if turns[0] == 0:
            return self._render_each_turn(messages, turns)
        spans = []
        for index in turns:
            start = render_chat(self.tokenizer, messages[:index], add_generation_prompt=True)
            until = render_chat(self.tokenizer, messages[: index + 1], add_generation_prompt=False)
            if whole[: len(start)] != start or whole[: len(until)] != until:
                return self._render_each_turn(messages, turns)
            spans.append((len(start), len(until)))
        return [_from_spans(whole, spans)]

    def _render_each_turn(self, messages: Messages, turns: Sequence[int]) -> list[RenderedExample]:
        """One example per assistant turn, with the history as the template shows it then."""
        found = []
        for index in turns:
            whole = render_chat(self.tokenizer, messages[: index + 1], add_generation_prompt=False)
            # A conversation that the assistant begins has nothing in front of it.
            start = render_chat(self.tokenizer, messages[:index], True) if index else []
            found.append(_from_spans(whole, [(_common_prefix_length(start, whole), len(whole))]))
        return found

    def _render_plain(self, messages: Messages) -> RenderedExample:
        tokens, is_learned = self._bos(), [False] * len(self._bos())
        for message in messages:
            content, is_answer = _message_text(message), message["role"] == "assistant"
            head = self._encode(f"{str(message['role']).capitalize()}:")
            body = self._encode(f" {content}")
            tail = [*self._eos()] if is_answer else []
            space = self._encode("\n\n")
            tokens += [*head, *body, *tail, *space]
            learned_length = len(body) + len(tail)
            is_learned += [False] * len(head) + [is_answer] * learned_length
            # Without an end-of-text token the empty line is what says that the answer is over.
            is_learned += [is_answer and not tail] * len(space)
        return RenderedExample(tokens, is_learned)

    def _truncate(self, example: RenderedExample) -> RenderedExample:
        limit, size = self.max_tokens, len(example.tokens)
        if limit is None or size <= limit:
            return example
        return RenderedExample(example.tokens[:limit], example.is_learned[:limit], size - limit)

    def _encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, add_special_tokens=False)

    def _bos(self) -> list[int]:
        first = getattr(self.tokenizer, "bos_token_id", None)
        begins = encode(self.tokenizer, "", add_special_tokens=True)
        return [first] if first is not None and begins[:1] == [first] else []

    def _eos(self) -> list[int]:
        last = getattr(self.tokenizer, "eos_token_id", None)
        return [] if last is None else [int(last)]


def _from_spans(tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> RenderedExample:
    is_learned = [False] * len(tokens)
    for start, end in spans:
        is_learned[start:end] = [True] * (end - start)
    return RenderedExample(tokens, is_learned)


def _learn_last_only(before: RenderedExample, whole: RenderedExample) -> RenderedExample:
    """The whole conversation, of which only what came last is learned."""
    num_old = len(before.tokens)
    return RenderedExample(whole.tokens, [*[False] * num_old, *whole.is_learned[num_old:]])


def _common_prefix_length(start: Sequence[int], whole: Sequence[int]) -> int:
    """How long both are the same: a template may word the end of a prompt in another way."""
    pairs = zip(start, whole, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _message_text(message: Any) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidInput(
            f"a message of role {message['role']!r} has no plain text, and this tokenizer has no "
            "chat template to lay it out"
        )
    return content
