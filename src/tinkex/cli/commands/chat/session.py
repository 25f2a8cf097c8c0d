"""What was said so far, and the orders that change it: /system, /reset, /save, /quit."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.commands.chat.streaming import ReplyFormat, StreamedReply
from tinkex.cli.commands.sampling_options import SampleSource, SamplingOptions, load_tokenizer_for
from tinkex.cli.context import Context
from tinkex.cli.errors import CliError, print_error
from tinkex.cli.output.samples import escape_lines
from tinkex.cli.progress import print_status
from tinkex.cli.prompts import resolve_output_file
from tinkex.data.rendering import Renderer
from tinkex.errors import TinkexError
from tinkex.units import format_count

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.client.service import ServiceClient

ChatMessage = dict[str, str]

CHAT_HELP = """\
/system TEXT  what the model is told before everything; without TEXT, nothing
/reset        forget what was said
/save FILE    add the conversation to a file that `tinkex train sft` reads
/quit         end, as Ctrl-D does
A \\ at the end of a line goes on in the next one; pasted lines are one message.
Ctrl-C stops an answer. // at the beginning sends a message that begins with /."""


class QuitChat(Exception):
    """The person is done."""


class Conversation:
    """The messages, oldest first."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system or None
        self.messages: list[ChatMessage] = []

    def with_user_message(self, text: str) -> list[ChatMessage]:
        """All that the model sees when this is said next."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages, {"role": "user", "content": text}]

    def add(self, text: str, answer: str) -> None:
        """Note what was said, and what was answered."""
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer},
        ]

    def run_slash_command(self, line: str) -> str | None:
        """Carry out an order; what to say about it, or None if it is no order."""
        word, _, rest = line.strip().partition(" ")
        order = self._slash_commands.get(word)
        return None if order is None else order(rest.strip())

    @property
    def _slash_commands(self) -> dict[str, Callable[[str], str]]:
        return {
            "/system": self._set_system,
            "/reset": self._reset,
            "/save": self._save,
            "/quit": self._quit,
            "/exit": self._quit,
            "/help": lambda rest: CHAT_HELP,
        }

    def _set_system(self, text: str) -> str:
        self.system = text or None
        return "The system message is set." if text else "There is no system message."

    def _reset(self, rest: str) -> str:
        self.messages = []
        return "Nothing was said so far."

    def _quit(self, rest: str) -> str:
        raise QuitChat

    def _save(self, name: str) -> str:
        if not name:
            return "Where to? /save FILE"
        if not self.messages:
            return "There is nothing to save."
        path = Path(name).expanduser()
        try:
            self._append(resolve_output_file(path))
        except CliError as error:
            return error.message
        except OSError as error:
            return f"{path} cannot be written: {error.strerror or error}"
        return f"Saved {format_count(len(self.messages), 'message')} to {path}"

    def _append(self, path: Path) -> None:
        from tinkex.system.atomic import write_file_atomic

        first = [{"role": "system", "content": self.system}] if self.system else []
        row = json.dumps({"messages": [*first, *self.messages]}, ensure_ascii=False)
        before = path.read_bytes() if path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"
        write_file_atomic(path, before + f"{row}\n".encode(), mode=0o644)


def unknown_command_message(line: str) -> str:
    """What to say about a word that begins like an order and is none."""
    return f"There is no {click.unstyle(line.split()[0])}; /help lists what there is."


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
