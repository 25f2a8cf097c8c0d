"""One talk: what is heard is an order or a message, and messages are answered."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from tinkex.cli.commands.chat.answers import ReplyFormat, StreamedReply
from tinkex.cli.commands.chat.conversation import Conversation, unknown_command_message
from tinkex.cli.commands.drawing import SampleSource, SamplingOptions, load_tokenizer_for
from tinkex.cli.context import Context
from tinkex.cli.errors import CliError, print_error
from tinkex.cli.output.samples import escape_lines
from tinkex.cli.progress import print_status
from tinkex.errors import TinkexError
from tinkex.recipes.rendering import Renderer
from tinkex.units import format_count

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.client.service import ServiceClient


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSession:
    """Somebody who hears, and somebody who answers."""

    context: Context
    sampler: SamplingClient
    reply_format: ReplyFormat
    options: SamplingOptions
    max_context_tokens: int | None = None
    """The most that the model can read and write together."""
    conversation: Conversation = field(default_factory=Conversation)

    @classmethod
    def start(
        cls,
        context: Context,
        client: ServiceClient,
        source: SampleSource,
        options: SamplingOptions,
        tokenizer: str | None,
    ) -> ChatSession:
        """Open a sampler and load its tokenizer."""
        sampler = source.create_client(client)
        renderer = Renderer(load_tokenizer_for(sampler, tokenizer))
        if not renderer.has_template:
            print_status(
                "This model has no chat template: messages are laid out as User: and Assistant:."
            )
        base_model = sampler.get_base_model()
        models = client.get_server_capabilities().supported_models
        sizes = [one.max_context_length for one in models if one.model_name == base_model]
        return cls(
            context=context,
            sampler=sampler,
            reply_format=ReplyFormat.for_renderer(renderer),
            options=options,
            max_context_tokens=sizes[0] if sizes else None,
        )

    def handle(self, text: str) -> None:
        """Carry out an order, or answer a message."""
        if text.startswith("//"):
            text = text[1:]
        elif text.startswith("/"):
            said = self.conversation.run_slash_command(text)
            if said is None and self.context.is_stdin_terminal:
                said = unknown_command_message(text)
            if said is not None:
                print_status(said)
                return
        self._reply_or_report(text)

    def _reply_or_report(self, text: str) -> None:
        """A person may try again after a failure; a pipe cannot."""
        if not self.context.is_stdin_terminal:
            self._reply(text)
            return
        try:
            self._reply(text)
        except TinkexError as error:
            print_error(error, self.context)

    def _reply(self, text: str) -> None:
        prompt = self.reply_format.renderer.render_prompt(
            tuple(self.conversation.with_user_message(text))
        )
        drawing = self.options._replace(max_tokens=self._max_reply_tokens(len(prompt)))
        answer = StreamedReply(self.sampler, prompt, drawing, self.reply_format)
        began = time.monotonic()
        try:
            self._print_stream(answer)
        except KeyboardInterrupt:
            if not self.context.is_stdin_terminal:
                raise
            answer.end_reason = "interrupted"
            print_status("\n(stopped)")
        if self.context.is_json:
            self._print_json(text, answer, time.monotonic() - began)
        if answer.text:
            self.conversation.add(text, answer.text)

    def _max_reply_tokens(self, num_prompt_tokens: int) -> int:
        """How long the answer may get."""
        if self.max_context_tokens is None:
            return self.options.max_tokens
        room = self.max_context_tokens - num_prompt_tokens
        if room < 1:
            raise CliError(
                f"The conversation has {format_count(num_prompt_tokens, 'token')}, and the model "
                f"reads at most {self.max_context_tokens}",
                "/reset forgets it.",
            )
        return min(room, self.options.max_tokens)

    def _print_stream(self, answer: StreamedReply) -> None:
        is_seen = self.context.stdout.is_terminal
        for piece in answer.stream():
            if not self.context.is_json:
                click.echo(escape_lines(piece) if is_seen else piece, nl=False, color=True)
                sys.stdout.flush()
        if not self.context.is_json:
            click.echo("")
        if answer.end_reason == "length" and self.context.is_stdin_terminal:
            print_status(
                f"(cut off after {format_count(len(answer.tokens), 'token')}; "
                "--max-tokens allows more)"
            )

    def _print_json(self, text: str, answer: StreamedReply, seconds: float) -> None:
        data = {
            "message": text,
            "text": answer.text,
            "stop_reason": answer.end_reason,
            "num_tokens": len(answer.tokens),
            "seconds": round(seconds, 3),
        }
        click.echo(json.dumps(data, ensure_ascii=True))
