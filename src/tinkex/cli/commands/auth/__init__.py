"""`tinkex auth`: store API keys and show which one is used."""

from __future__ import annotations

import click

from tinkex.cli.lazy import LazyCommand, LazyGroup

_PACKAGE = "tinkex.cli.commands.auth"
COMMANDS = {
    "login": LazyCommand(f"{_PACKAGE}.login:login", "Verify an API key and store it."),
    "logout": LazyCommand(f"{_PACKAGE}.login:logout", "Delete a stored API key."),
    "status": LazyCommand(
        f"{_PACKAGE}.status:status", "Show whether a key is configured and accepted"
    ),
    "whoami": LazyCommand(f"{_PACKAGE}.status:whoami", "Show the owner of the key."),
}


@click.group(cls=LazyGroup, entries=COMMANDS)
def auth() -> None:
    """Store API keys and show which one is used."""
