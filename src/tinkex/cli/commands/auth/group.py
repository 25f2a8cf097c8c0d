"""`tinkex auth` itself: which commands it has."""

from __future__ import annotations

import click

from tinkex.cli.lazy import Entry, LazyGroup

_HERE = "tinkex.cli.commands.auth"
COMMANDS = {
    "login": Entry(f"{_HERE}.login:login", "Check a key with the server and store it."),
    "logout": Entry(f"{_HERE}.logout:logout", "Forget a stored key."),
    "status": Entry(f"{_HERE}.status:status", "Say whether there is a key and the server takes it"),
    "whoami": Entry(f"{_HERE}.whoami:whoami", "Show whose key is used."),
}


@click.group(cls=LazyGroup, entries=COMMANDS)
def auth() -> None:
    """Store keys of servers, and see which one is used."""
