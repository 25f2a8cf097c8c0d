"""`tinkex auth`: a module for each of its commands."""

from __future__ import annotations

import click

from tinkex.cli.lazy import LazyCommand, LazyGroup

_PACKAGE = "tinkex.cli.commands.auth"
COMMANDS = {
    "login": LazyCommand(f"{_PACKAGE}.login:login", "Check a key with the server and store it."),
    "logout": LazyCommand(f"{_PACKAGE}.login:logout", "Forget a stored key."),
    "status": LazyCommand(
        f"{_PACKAGE}.status:status", "Say whether there is a key and the server takes it"
    ),
    "whoami": LazyCommand(f"{_PACKAGE}.status:whoami", "Show whose key is used."),
}


@click.group(cls=LazyGroup, entries=COMMANDS)
def auth() -> None:
    """Store keys of servers, and see which one is used."""
