"""The `tinkex` command."""

from __future__ import annotations

import json
import platform

import click

from tinkex.settings import package_version


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train and serve LoRA adapters through the Tinker API.",
)
@click.version_option(package_name="tinkex", message="tinkex %(version)s")
def main() -> None:
    """The command without a subcommand shows help."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version of tinkex."""
    found = {"version": package_version(), "python": platform.python_version()}
    click.echo(json.dumps(found) if as_json else f"tinkex {found['version']}")
