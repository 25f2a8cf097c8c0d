"""The prompt of `tinkex run sample`: text or token ids, as an option, in a file or from stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from tinkex.cli.errors import CliError
from tinkex.cli.progress import print_status

if TYPE_CHECKING:
    from tinkex.text import Tokenizer

STDIN = "-"
_PROMPT_FLAGS = ("--prompt", "--prompt-file", "--prompt-tokens")


class PromptInput(NamedTuple):
    """What to continue."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None

    def encode(self, tokenizer: Tokenizer | None, *, as_chat: bool) -> list[int]:
        """Its token ids; as a chat it is what a user says, and the answer comes next."""
        if self.text is None or tokenizer is None:
            return list(self.tokens or ())
        if as_chat:
            from tinkex.recipes.rendering import Renderer

            return Renderer(tokenizer).render_prompt(({"role": "user", "content": self.text},))
        from tinkex.types import ModelInput

        found = ModelInput.from_text(self.text, tokenizer).to_ints()
        if not found:
            raise CliError("The prompt has no tokens", "Give a text that is not empty.")
        return found


def read_prompt(
    prompt: str | None, prompt_file: str | None, prompt_tokens: str | None
) -> PromptInput:
    """The one prompt that was given; a newline at the end of a file is not part of it."""
    given = dict(zip(_PROMPT_FLAGS, (prompt, prompt_file, prompt_tokens), strict=True))
    named = [flag for flag, value in given.items() if value is not None]
    if not named:
        raise click.UsageError("There is no prompt: give --prompt or --prompt-file.")
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} exclude each other: give one prompt.")
    if prompt_tokens is not None:
        return PromptInput(tokens=_read_tokens(prompt_tokens))
    if prompt_file is not None:
        return PromptInput(text=_read_text_file(prompt_file))
    assert prompt is not None
    text = _read_stdin() if prompt == STDIN else prompt
    if not text:
        raise click.UsageError("The prompt is empty.")
    return PromptInput(text=text)


def parse_tokens(text: str) -> tuple[int, ...] | None:
    """Token ids as `[1, 2]`, `1,2` or `1 2`; None if it is something else."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    words = inner.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdecimal() for word in words):
        return None
    return tuple(int(word) for word in words)


def _read_tokens(given: str) -> tuple[int, ...]:
    found = parse_tokens(given)
    if found is None:
        try:
            found = parse_tokens(_read_stdin() if given == STDIN else _read_file(given))
        except FileNotFoundError:
            raise click.UsageError(
                f"--prompt-tokens {given} is neither a list of token ids such as 1,2,3 nor a file."
            ) from None
    if found is None:
        raise click.UsageError(
            f"--prompt-tokens {given} holds no token ids; write them as 1,2,3 or [1, 2, 3]."
        )
    return found


def _read_text_file(name: str) -> str:
    text = _read_stdin() if name == STDIN else _read_file(name)
    if not text:
        raise click.UsageError(f"The prompt in {name} is empty.")
    if _is_number_list(text):
        shown = "what stdin gave" if name == STDIN else name
        print_status(
            f"Note: {shown} is a list of numbers and is read as text; --prompt-tokens {name} "
            "reads it as token ids."
        )
    return text


def _is_number_list(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    is_list = isinstance(found, list) and bool(found)
    return is_list and all(type(item) is int for item in found)


def _read_file(name: str) -> str:
    try:
        return _without_last_newline(Path(name).expanduser().read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise CliError(f"{name} is no UTF-8 text: {error}") from error


def _read_stdin() -> str:
    try:
        return _without_last_newline("" if sys.stdin is None else sys.stdin.read())
    except UnicodeDecodeError as error:
        raise CliError(f"stdin is no UTF-8 text: {error}") from error


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
