"""Messages from a person or from a pipe."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Iterator

import click

from tinkex.cli.context import Context

INPUT_PROMPT, CONTINUATION_PROMPT = "> ", "... "
#: Lines of a paste come faster than this.
_PASTE_SECONDS = 0.05


def read_messages(context: Context) -> Iterator[str]:
    """What is said, one message at a time, until the end of stdin."""
    return _read_typed(context) if context.is_stdin_terminal else _read_piped()


def _read_piped() -> Iterator[str]:
    if sys.stdin is None:
        return
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\r\n")


def _read_typed(context: Context) -> Iterator[str]:
    with contextlib.suppress(ImportError):
        # Its presence gives input() a line that can be edited, and a history.
        import readline  # noqa: F401
    while True:
        try:
            text = _read_message(context)
        except EOFError:
            click.echo("", err=True)
            return
        except KeyboardInterrupt:
            click.echo("\nCtrl-D or /quit ends.", err=True)
            continue
        if text.strip():
            yield text


def _read_message(context: Context) -> str:
    """One message: lines that end with a backslash, or were pasted together, belong together."""
    lines = [_read_line(context, INPUT_PROMPT)]
    while True:
        if lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(_read_line(context, CONTINUATION_PROMPT))
        elif _has_pending_input():
            lines.append(_read_line(context, ""))
        else:
            return "\n".join(lines)


def _read_line(context: Context, prompt: str) -> str:
    if context.stdout.is_terminal:
        return input(prompt)
    # input() would write its prompt among the answers.
    click.echo(prompt, err=True, nl=False)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _has_pending_input() -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], _PASTE_SECONDS)[0])
    except (OSError, ValueError):
        # Not something that can be waited for, as on Windows.
        return False
