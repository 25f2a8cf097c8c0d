"""What was said so far, and the orders that change it: /system, /reset, /save, /quit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click

from tinkex.cli.errors import CliError
from tinkex.cli.files import resolve_output_file
from tinkex.units import format_count

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
        from tinkex.checkpoint.atomic import write_file_atomic

        first = [{"role": "system", "content": self.system}] if self.system else []
        row = json.dumps({"messages": [*first, *self.messages]}, ensure_ascii=False)
        before = path.read_bytes() if path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"
        write_file_atomic(path, before + f"{row}\n".encode(), mode=0o644)


def unknown_command_message(line: str) -> str:
    """What to say about a word that begins like an order and is none."""
    return f"There is no {click.unstyle(line.split()[0])}; /help lists what there is."
