"""One talk: what is heard is an order or a message, and messages are answered."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from tinkex.cli.commands.chat.answers import Answer, Manner
from tinkex.cli.commands.chat.conversation import Conversation, unknown_order
from tinkex.cli.commands.drawing import Drawing, Source, tokenizer_of
from tinkex.cli.context import Context
from tinkex.cli.errors import CliError, report
from tinkex.cli.output.samples import harmless
from tinkex.cli.progress import tell
from tinkex.errors import TinkexError
from tinkex.recipes.rendering import Renderer
from tinkex.units import format_count

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.client.service import ServiceClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Somebody who hears, and somebody who answers."""

    context: Context
    sampler: SamplingClient
    manner: Manner
    drawing: Drawing
    max_context_tokens: int | None = None
    """The most that the model can read and write together."""
    conversation: Conversation = field(default_factory=Conversation)

    @classmethod
    def begin(
        cls,
        context: Context,
        client: ServiceClient,
        source: Source,
        drawing: Drawing,
        tokenizer: str | None,
    ) -> Talk:
        """Open a sampler and load its tokenizer."""
        sampler = source.open(client)
        renderer = Renderer(tokenizer_of(sampler, tokenizer))
        if not renderer.has_template:
            tell("This model has no chat template: messages are laid out as User: and Assistant:.")
        base_model = sampler.get_base_model()
        models = client.get_server_capabilities().supported_models
        sizes = [one.max_context_length for one in models if one.model_name == base_model]
        return cls(
            context=context,
            sampler=sampler,
            manner=Manner.of(renderer),
            drawing=drawing,
            max_context_tokens=sizes[0] if sizes else None,
        )

    def hear(self, text: str) -> None:
        """Carry out an order, or answer a message."""
        if text.startswith("//"):
            text = text[1:]
        elif text.startswith("/"):
            said = self.conversation.obey(text)
            if said is None and self.context.is_stdin_terminal:
                said = unknown_order(text)
            if said is not None:
                tell(said)
                return
        self._answer_safely(text)

    def _answer_safely(self, text: str) -> None:
        """A person may try again after a failure; a pipe cannot."""
        if not self.context.is_stdin_terminal:
            self._answer(text)
            return
        try:
            self._answer(text)
        except TinkexError as error:
            report(error, self.context)

    def _answer(self, text: str) -> None:
        prompt = self.manner.renderer.render_prompt(tuple(self.conversation.asked(text)))
        drawing = self.drawing._replace(max_tokens=self._room(len(prompt)))
        answer = Answer(self.sampler, prompt, drawing, self.manner)
        began = time.monotonic()
        try:
            self._say(answer)
        except KeyboardInterrupt:
            if not self.context.is_stdin_terminal:
                raise
            answer.end = "interrupted"
            tell("\n(stopped)")
        if self.context.is_json:
            self._say_json(text, answer, time.monotonic() - began)
        if answer.text:
            self.conversation.add(text, answer.text)

    def _room(self, num_prompt_tokens: int) -> int:
        """How long the answer may get."""
        if self.max_context_tokens is None:
            return self.drawing.max_tokens
        room = self.max_context_tokens - num_prompt_tokens
        if room < 1:
            raise CliError(
                f"The conversation has {format_count(num_prompt_tokens, 'token')}, and the model "
                f"reads at most {self.max_context_tokens}",
                "/reset forgets it.",
            )
        return min(room, self.drawing.max_tokens)

    def _say(self, answer: Answer) -> None:
        is_seen = self.context.stdout.is_terminal
        for piece in answer.pieces():
            if not self.context.is_json:
                click.echo(harmless(piece) if is_seen else piece, nl=False, color=True)
                sys.stdout.flush()
        if not self.context.is_json:
            click.echo("")
        if answer.end == "length" and self.context.is_stdin_terminal:
            tell(
                f"(cut off after {format_count(len(answer.tokens), 'token')}; "
                "--max-tokens allows more)"
            )

    def _say_json(self, text: str, answer: Answer, seconds: float) -> None:
        data = {
            "message": text,
            "text": answer.text,
            "stop_reason": answer.end,
            "num_tokens": len(answer.tokens),
            "seconds": round(seconds, 3),
        }
        click.echo(json.dumps(data, ensure_ascii=True))
