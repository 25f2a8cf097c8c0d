"""`tinkex checkpoint delete`: checkpoints by address or by what they are like."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import click

from tinkex.cli.client import rest_client
from tinkex.cli.commands.checkpoint.asking import exit_cancelled, yes_option
from tinkex.cli.commands.checkpoint.deletion import BulkDeletion, DeletionResult
from tinkex.cli.commands.checkpoint.parameters import IsoDateTime
from tinkex.cli.commands.checkpoint.selection import (
    CHECKPOINT_TYPES,
    CheckpointFilter,
    SelectedCheckpoint,
    describe_selection,
    fetch_selected,
    find_matching,
)
from tinkex.cli.completing import CHECKPOINT, RUN
from tinkex.cli.context import Context, pass_context
from tinkex.cli.format import format_count
from tinkex.cli.options import Command
from tinkex.cli.output import announce
from tinkex.cli.progress import progress_bar
from tinkex.cli.prompts import confirm
from tinkex.cli.short_ids import resolve_path, resolve_run
from tinkex.ids import parse_tinker_path

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient


@click.command(cls=Command)
@click.argument("paths", nargs=-1, type=CHECKPOINT)
@click.option("--run-id", type=RUN, metavar="ID", help="All of this run that fit.")
@click.option(
    "--type",
    "checkpoint_type",
    type=click.Choice(list(CHECKPOINT_TYPES)),
    metavar="TYPE",
    help="Only training, sampler or external ones.",
)
@click.option(
    "--before",
    type=IsoDateTime(),
    metavar="DATE",
    help="Only those made before: 2026-01-31, or a time.",
)
@click.option(
    "--after", type=IsoDateTime(), metavar="DATE", help="Only those made after; dates are in UTC."
)
@yes_option()
@pass_context
def delete(
    context: Context,
    paths: tuple[str, ...],
    run_id: str | None,
    checkpoint_type: str | None,
    before: datetime | None,
    after: datetime | None,
    yes: bool,
) -> None:
    """Delete checkpoints for good.

    Name them by their addresses, or say what they are like; without --run-id that means those of
    all your runs. Asks once before it begins, and goes on if one of them cannot be deleted.

    \b
      tinkex checkpoint delete tinker://RUN_ID/weights/0001 tinker://RUN_ID/weights/0002
      tinkex checkpoint delete --run-id RUN_ID --type training --before 2026-01-31
    """
    kind = CHECKPOINT_TYPES[checkpoint_type] if checkpoint_type else None
    wanted = CheckpointFilter(run_id=run_id, checkpoint_type=kind, before=before, after=after)
    if bool(paths) is not wanted.is_empty:
        raise click.UsageError("Give either paths, or some of --run-id --type --before --after.")
    with rest_client(context) as client:
        paths = tuple(resolve_path(client, path) for path in paths)
        if run_id is not None:
            wanted = wanted._replace(run_id=resolve_run(client, run_id))
        outcome = _confirm_and_delete(
            context, client, _select(context, client, paths, wanted, yes), yes
        )
    if outcome.shared_error is not None:
        raise outcome.shared_error
    if outcome != DeletionResult():
        announce(context, outcome.to_text(), outcome.to_dict())
    else:
        announce(context, "No checkpoints match: nothing was deleted.", outcome.to_dict())
    click.get_current_context().exit(outcome.exit_code)


def _select(
    context: Context,
    client: RestClient,
    paths: tuple[str, ...],
    filters: CheckpointFilter,
    yes: bool,
) -> list[SelectedCheckpoint]:
    if not paths:
        return find_matching(context, client, filters)
    different = list(dict.fromkeys(paths))
    for path in different:
        parse_tinker_path(path)
    # What they are is for the question alone.
    return (
        [SelectedCheckpoint(path) for path in different]
        if yes
        else fetch_selected(client, different)
    )


def _confirm_and_delete(
    context: Context, client: RestClient, selected: list[SelectedCheckpoint], yes: bool
) -> DeletionResult:
    if not selected:
        return DeletionResult()
    if not yes:
        question = f"Delete {format_count(len(selected), 'checkpoint')}?"
        if not confirm(question, about=f"Will delete {describe_selection(selected)}"):
            exit_cancelled(context, DeletionResult().to_dict())
    send = client.delete_checkpoint_from_tinker_path
    with progress_bar(context, "Deleting", len(selected)) as shown:
        return BulkDeletion(send, [one.path for one in selected]).run(shown.advance)
