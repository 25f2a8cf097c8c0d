"""Conversation state, slash commands (/system, /reset, /save, /quit) and replies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.commands.chat.streaming import ReplyFormat, StreamedReply
from tinkex.cli.commands.sampling_options import SampleSource, SamplingOptions, load_tokenizer_for
from tinkex.cli.context import Context
from tinkex.cli.errors import CliError, print_error
from tinkex.cli.output.streamed_text import print_part
from tinkex.cli.progress import print_status, spinner
from tinkex.cli.prompts import resolve_output_file
from tinkex.data.rendering import Renderer
from tinkex.display import format_count
from tinkex.errors import TinkexError

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.client.service import ServiceClient
    from tinkex.client.token_stream import TokenStreamer

ChatMessage = dict[str, str]

CHAT_HELP = """\
/system TEXT  set the system message; without TEXT, remove it
/reset        start a new conversation
/save FILE    append the conversation to a file that `tinkex train sft` reads
/quit         end the chat, like Ctrl-D
A \\ at the end of a line continues the message; pasted lines are one message.
Ctrl-C stops a reply. Start a message with // to send one that begins with /."""


class QuitChat(Exception):
    """The user ended the chat."""


class Conversation:
    """System message and messages, oldest first."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system or None
        self.messages: list[ChatMessage] = []

    def with_user_message(self, text: str) -> list[ChatMessage]:
        """Return all messages of the prompt for a new user message."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages, {"role": "user", "content": text}]

    def add(self, text: str, reply: str) -> None:
        """Append a message and its reply."""
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": reply},
        ]

    def run_slash_command(self, line: str) -> str | None:
        """Run a slash command and return its message; None if it is not one."""
        word, _, rest = line.strip().partition(" ")
        command = self._slash_commands.get(word)
        return None if command is None else command(rest.strip())

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
        return "System message set." if text else "System message removed."

    def _reset(self, rest: str) -> str:
        self.messages = []
        return "Started a new conversation."

    def _quit(self, rest: str) -> str:
        raise QuitChat

    def _save(self, name: str) -> str:
        if not name:
            return "Usage: /save FILE"
        if not self.messages:
            return "Nothing to save yet."
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
    """Return the message for an unknown slash command."""
    return f"Unknown command {click.unstyle(line.split()[0])}; /help lists the commands."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSession:
    """A conversation with a sampling client."""

    context: Context
    sampler: SamplingClient
    reply_format: ReplyFormat
    options: SamplingOptions
    streamer: TokenStreamer | None = None
    max_context_tokens: int | None = None
    """Context length of the model; None if unknown."""
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
        from tinkex.client.token_stream import TokenStreamer

        sampler = source.create_client(client)
        renderer = Renderer(load_tokenizer_for(sampler, tokenizer))
        if not renderer.has_template:
            print_status(
                "This model has no chat template: messages are formatted as User: and Assistant:."
            )
        base_model = sampler.get_base_model().result()
        models = client.get_server_capabilities().result().supported_models
        sizes = [model.max_context_length for model in models if model.model_name == base_model]
        return cls(
            context=context,
            sampler=sampler,
            reply_format=ReplyFormat.for_renderer(renderer),
            options=options,
            streamer=TokenStreamer(sampler.holder, source.name),
            max_context_tokens=sizes[0] if sizes else None,
        )

    def handle(self, text: str) -> None:
        """Run a slash command, or reply to a message."""
        if text.startswith("//"):
            text = text[1:]
        elif text.startswith("/"):
            message = self.conversation.run_slash_command(text)
            if message is None and self.context.is_stdin_terminal:
                message = unknown_command_message(text)
            if message is not None:
                print_status(message)
                return
        self._reply_or_report(text)

    def _reply_or_report(self, text: str) -> None:
        """Reply; on a terminal, print errors so that the user can retry."""
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
        options = self.options._replace(max_tokens=self._max_reply_tokens(len(prompt)))
        reply = StreamedReply(self.sampler, prompt, options, self.reply_format, self.streamer)
        start = time.monotonic()
        try:
            self._print_stream(reply)
        except KeyboardInterrupt:
            if not self.context.is_stdin_terminal:
                raise
            reply.end_reason = "interrupted"
            print_status("\n(stopped)")
        if self.context.is_json:
            self._print_json(text, reply, time.monotonic() - start)
        if reply.text:
            self.conversation.add(text, reply.text)

    def _max_reply_tokens(self, num_prompt_tokens: int) -> int:
        """Return the token limit of a reply that fits into the context."""
        if self.max_context_tokens is None:
            return self.options.max_tokens
        num_free = self.max_context_tokens - num_prompt_tokens
        if num_free < 1:
            raise CliError(
                f"The conversation has {format_count(num_prompt_tokens, 'token')}, but the model's "
                f"context length is {self.max_context_tokens}",
                "/reset starts a new conversation.",
            )
        return min(num_free, self.options.max_tokens)

    def _print_stream(self, reply: StreamedReply) -> None:
        is_watched = self.context.is_stdin_terminal and self.context.stderr.is_terminal
        waiting = "Waiting for the reply ..." if is_watched and not self.context.is_json else ""
        with closing(reply.stream()) as stream, spinner(waiting) as status:
            for text in stream:
                status.close()
                if not self.context.is_json:
                    print_part(text, self.context.stdout)
        if not self.context.is_json:
            click.echo("")
        if reply.end_reason == "length" and self.context.is_stdin_terminal:
            print_status(
                f"(cut off after {format_count(len(reply.tokens), 'token')}; "
                "--max-tokens allows more)"
            )

    def _print_json(self, text: str, reply: StreamedReply, seconds: float) -> None:
        data = {
            "message": text,
            "text": reply.text,
            "stop_reason": reply.end_reason,
            "num_tokens": len(reply.tokens),
            "seconds": round(seconds, 3),
        }
        click.echo(json.dumps(data, ensure_ascii=True))
