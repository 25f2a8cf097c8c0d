"""`tinkex session` itself: which commands it has."""

from __future__ import annotations

import click

from tinkex.cli.lazy import Entry, LazyGroup

_HERE = "tinkex.cli.commands.session"
COMMANDS = {
    "export-trace": Entry(
        f"{_HERE}.export_trace:export_trace", "Save a session's timeline as a Perfetto trace."
    ),
    "finish": Entry(f"{_HERE}.finish:finish", "End a session on the server."),
    "info": Entry(f"{_HERE}.info:info", "Show one session."),
    "list": Entry(f"{_HERE}.list:list_sessions", "List sessions, newest first."),
}


@click.group(cls=LazyGroup, entries=COMMANDS)
def session() -> None:
    """List sessions, end them and export their timelines."""
