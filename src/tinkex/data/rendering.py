"""Render rows as tokens with loss masks.

Conversations use the tokenizer's chat template. Without a template, each message is rendered as
"Role: content" and an empty line, and assistant messages end with the EOS token if there is one.
Prompt and completion are always plain text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkex.data.chatml import Message
from tinkex.data.layouts import Messages
from tinkex.data.rows import ChatRow, PreferenceRow, Prompt, PromptCompletionRow
from tinkex.errors import InvalidInput
from tinkex.text import Tokenizer, encode, render_chat
from tinkex.types import Datum, ModelInput


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """Tokens and their loss mask."""

    tokens: Sequence[int]
    is_learned: Sequence[bool]
    num_truncated: int = 0
    """Number of tokens removed at the end."""

    @property
    def num_learned(self) -> int:
        """Number of targets; the first token is never one."""
        return sum(self.is_learned[1:])

    @property
    def model_input(self) -> ModelInput:
        """All tokens as model input."""
        return ModelInput.from_ints(self.tokens)

    def to_datum(self, weight: float = 1.0) -> Datum:
        """Convert to a cross-entropy datum: position i predicts token i + 1 with this weight."""
        return Datum(
            model_input=ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": list(self.tokens[1:]),
                "weights": [weight if is_learned else 0.0 for is_learned in self.is_learned[1:]],
            },
        )

    def sum_target_logprobs(self, logprobs: Sequence[float]) -> float:
        """Sum the log-probabilities of the targets."""
        return sum(itertools.compress(logprobs, self.is_learned[1:]))


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders rows for one tokenizer."""

    tokenizer: Tokenizer
    max_tokens: int | None = None
    """Examples are truncated to this length."""
    has_template: bool = field(init=False)

    def __post_init__(self) -> None:
        template = getattr(self.tokenizer, "chat_template", None)
        has_template = bool(template) and hasattr(self.tokenizer, "apply_chat_template")
        object.__setattr__(self, "has_template", has_template)

    def render_examples(self, row: ChatRow | PromptCompletionRow) -> list[RenderedExample]:
        """Render a row: one example, or one per turn if the template rewrites earlier turns."""
        if isinstance(row, PromptCompletionRow):
            examples = [self._render_answer(row.prompt, row.completion)]
        elif self.has_template:
            examples = self._render_with_template(row.messages)
        else:
            examples = [self._render_plain(row.messages)]
        return [self._truncate(example) for example in examples]

    def render_pair(self, row: PreferenceRow) -> tuple[RenderedExample, RenderedExample]:
        """Render the prompt with the chosen and with the rejected answer."""
        chosen, rejected = (
            self._truncate(self._render_answer(row.prompt, answer))
            for answer in (row.chosen, row.rejected)
        )
        return chosen, rejected

    def render_prompt(self, prompt: Prompt) -> list[int]:
        """Render a prompt for sampling."""
        if isinstance(prompt, str):
            return [*self._bos(), *self._encode(prompt)]
        if self.has_template:
            return render_chat(self.tokenizer, prompt, add_generation_prompt=True)
        return [*self._render_plain(prompt).tokens, *self._encode("Assistant:")]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode sampled tokens without special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _render_answer(self, prompt: Prompt, answer: str) -> RenderedExample:
        if not isinstance(prompt, str):
            message = {"role": "assistant", "content": answer}
            if not self.has_template:
                return _learn_last_only(
                    self._render_plain(prompt), self._render_plain((*prompt, message))
                )
            start = render_chat(self.tokenizer, prompt, add_generation_prompt=True)
            full = render_chat(self.tokenizer, (*prompt, message), add_generation_prompt=False)
            return _from_spans(full, [(_common_prefix_length(start, full), len(full))])
        # Encode separately, so that the targets match the tokens sampled after the prompt.
        start = self.render_prompt(prompt)
        full = [*start, *self._encode(answer), *self._eos()]
        return _from_spans(full, [(len(start), len(full))])

    def _render_with_template(self, messages: Messages) -> list[RenderedExample]:
        full = render_chat(self.tokenizer, messages, add_generation_prompt=False)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if turns[0] == 0:
            return self._render_each_turn(messages, turns)
        spans = []
        for index in turns:
            start = render_chat(self.tokenizer, messages[:index], add_generation_prompt=True)
            until = render_chat(self.tokenizer, messages[: index + 1], add_generation_prompt=False)
            if full[: len(start)] != start or full[: len(until)] != until:
                return self._render_each_turn(messages, turns)
            spans.append((len(start), len(until)))
        return [_from_spans(full, spans)]

    def _render_each_turn(self, messages: Messages, turns: Sequence[int]) -> list[RenderedExample]:
        """Render one example per assistant turn, with the history as the template shows it then."""
        examples = []
        for index in turns:
            full = render_chat(self.tokenizer, messages[: index + 1], add_generation_prompt=False)
            # A conversation may start with an assistant message.
            start = render_chat(self.tokenizer, messages[:index], True) if index else []
            examples.append(_from_spans(full, [(_common_prefix_length(start, full), len(full))]))
        return examples

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
            # Without an EOS token, the empty line marks the end of the answer.
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
        bos = getattr(self.tokenizer, "bos_token_id", None)
        prefix = encode(self.tokenizer, "", add_special_tokens=True)
        return [bos] if bos is not None and prefix[:1] == [bos] else []

    def _eos(self) -> list[int]:
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return [] if eos is None else [int(eos)]


def find_end_of_turn(renderer: Renderer) -> list[int]:
    """Return the special token that the chat template puts after an assistant message."""
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    try:
        example = renderer.render_examples(ChatRow((question, answer)))[0]
    except InvalidInput:
        return []
    special = set(getattr(renderer.tokenizer, "all_special_ids", ()))
    learned = itertools.compress(example.tokens, example.is_learned)
    return [token for token in learned if token in special][-1:]


def _from_spans(tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> RenderedExample:
    is_learned = [False] * len(tokens)
    for start, end in spans:
        is_learned[start:end] = [True] * (end - start)
    return RenderedExample(tokens, is_learned)


def _learn_last_only(before: RenderedExample, full: RenderedExample) -> RenderedExample:
    """Return the full conversation with only its last message as target."""
    num_old = len(before.tokens)
    return RenderedExample(full.tokens, [*[False] * num_old, *full.is_learned[num_old:]])


def _common_prefix_length(start: Sequence[int], full: Sequence[int]) -> int:
    """Return the common prefix length; a template may end a prompt differently."""
    pairs = zip(start, full, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _message_text(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidInput(
            f"a message of role {message['role']!r} has no plain text, and this tokenizer has no "
            "chat template to render it"
        )
    return content
