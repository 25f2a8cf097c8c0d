"""`tinkex checkpoint download`: a checkpoint's files, whole and checked."""

from __future__ import annotations

from pathlib import Path

import click

from tinkex.cli.completing import CHECKPOINT
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import show
from tinkex.cli.short_ids import expand_path
from tinkex.ids import TinkerPath, parse_tinker_path


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="DIR",
    help="The folder in which the checkpoint's own folder is made.  [default: this one]",
)
@click.option("--force", is_flag=True, help="Replace it if it is there, once all has arrived.")
@click.option("--no-extract", is_flag=True, help="Keep the server's archive as one file.")
@click.option(
    "-i",
    "--identity",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Decrypt an encrypted checkpoint with this age identity file or SSH private key.",
)
@pass_context
def download(
    context: Context,
    path: str,
    output: Path,
    force: bool,
    no_extract: bool,
    identity: Path | None,
) -> None:
    """Download a checkpoint's files.

    PATH is its address, such as tinker://RUN_ID/weights/0001, and its folder is called
    RUN_ID_weights_0001, with _ for every colon. The folder appears when everything has arrived and
    was checked. After an interruption the same command goes on where it stopped.
    """
    from tinkex.cli.commands.checkpoint.fetching import check_not_exists, fetch_checkpoint
    from tinkex.cli.output.transfers import CheckpointDownload, FileTotals

    path = expand_path(context, path)
    name = checkpoint_folder_name(parse_tinker_path(path))
    destination = output / (f"{name}.tar" if no_extract else name)
    check_not_exists(destination, force=force)
    fetch_checkpoint(
        context, path, destination, force=force, extract=not no_extract, identity=identity
    )
    show(context, CheckpointDownload(path, destination, FileTotals.measure(destination)))


def checkpoint_folder_name(path: TinkerPath) -> str:
    """What a checkpoint's folder is called; a colon is not allowed in names everywhere."""
    return f"{path.run_id}_{path.segment}_{path.name}".replace(":", "_")
