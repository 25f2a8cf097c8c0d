"""`tinkex version`."""

from __future__ import annotations

import json
import platform

import click

from tinkex.settings import package_version


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version of tinkex."""
    found = {"version": package_version(), "python": platform.python_version()}
    click.echo(json.dumps(found) if as_json else f"tinkex {found['version']}")
