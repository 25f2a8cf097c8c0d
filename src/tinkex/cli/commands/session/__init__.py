"""`tinkex session`: list, inspect and finish sessions."""

from __future__ import annotations

import click

from tinkex.cli.lazy import LazyCommand, LazyGroup

_PACKAGE = "tinkex.cli.commands.session"
COMMANDS = {
    "export-trace": LazyCommand(
        f"{_PACKAGE}.list:export_trace", "Download a session's timeline as a Perfetto trace."
    ),
    "finish": LazyCommand(f"{_PACKAGE}.list:finish", "Finish a session on the server."),
    "info": LazyCommand(f"{_PACKAGE}.list:info", "Show one session."),
    "list": LazyCommand(f"{_PACKAGE}.list:list_sessions", "List sessions, newest first."),
}


@click.group(cls=LazyGroup, entries=COMMANDS)
def session() -> None:
    """List sessions, finish them and export their traces."""
