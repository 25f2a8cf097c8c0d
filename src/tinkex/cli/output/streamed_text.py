"""Text of tokens that arrive one after another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tinkex.cli.output.samples import escape_lines

if TYPE_CHECKING:
    from tinkex.cli.context import Screen

#: Decoded from bytes that do not form a complete character yet.
_REPLACEMENT_CHAR = "\ufffd"


def stable_text(text: str, ends: Sequence[str], *, is_over: bool) -> tuple[str, bool]:
    """Return the part of a text that will not change, and whether a stop text was reached."""
    indices = [index for index in (text.find(end) for end in ends) if index >= 0]
    if indices:
        return text[: min(indices)], True
    if is_over:
        return text, False
    shown = text.rstrip(_REPLACEMENT_CHAR)
    for end in ends:
        for length in range(min(len(end) - 1, len(shown)), 0, -1):
            if shown.endswith(end[:length]):
                shown = shown[:-length]
                break
    return shown, False


def print_part(text: str, screen: Screen) -> None:
    """Write a part of a text to stdout at once; control characters are escaped on a terminal."""
    click.echo(escape_lines(text) if screen.is_terminal else text, nl=False, color=True)
    sys.stdout.flush()
