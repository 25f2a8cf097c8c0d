"""The `tinkex` command."""

from __future__ import annotations

import click

from tinkex.cli.errors import ReportingGroup
from tinkex.cli.lazy import Entry

COMMANDS = {
    "key": Entry("tinkex.cli.commands.key:key", "Make, list and revoke keys of a server."),
    "model": Entry("tinkex.cli.commands.model:model", "Add, list and remove base models."),
    "serve": Entry("tinkex.cli.commands.serve:serve", "Run a server on this machine."),
    "version": Entry("tinkex.cli.commands.version:version", "Print the version of tinkex."),
}


@click.group(
    cls=ReportingGroup,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train and serve LoRA adapters through the Tinker API.",
)
@click.version_option(package_name="tinkex", message="tinkex %(version)s")
def main() -> None:
    """The command without a subcommand shows help."""
