"""Deleting many checkpoints at once: a failure stops nothing, and Ctrl-C loses no outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tinkex.cli.client import rest_client
from tinkex.cli.commands.checkpoint.list import (
    CHECKPOINT_TYPES,
    CheckpointFilter,
    SelectedCheckpoint,
    describe_selection,
    fetch_selected,
    find_matching,
)
from tinkex.cli.commands.time_params import IsoDateTime
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import FAILED, INTERRUPTED, describe_error
from tinkex.cli.format import escape_line, format_count
from tinkex.cli.id_completion import CHECKPOINT, RUN
from tinkex.cli.options import Command
from tinkex.cli.output import announce
from tinkex.cli.progress import progress_bar
from tinkex.cli.prompts import confirm, exit_cancelled, yes_option
from tinkex.cli.short_ids import resolve_path, resolve_run
from tinkex.errors import APIConnectionError, AuthenticationError, TinkexError
from tinkex.ids import parse_tinker_path

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinkex.client.rest import RestClient

MAX_IN_FLIGHT = 32
#: How long an interrupted command waits for the answers to what it has sent.
SETTLE_SECONDS = 2.0
#: Failures that every other checkpoint would share.
FATAL_ERRORS = (APIConnectionError, AuthenticationError)


class DeletionResult(NamedTuple):
    """What became of each checkpoint, by its path."""

    deleted: Sequence[str] = ()
    failed: Sequence[tuple[str, BaseException]] = ()
    unknown: Sequence[str] = ()
    """Those whose deletion was sent and not answered."""
    untried: Sequence[str] = ()
    is_interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 if all are gone."""
        if self.is_interrupted:
            return INTERRUPTED
        return FAILED if self.failed or self.unknown or self.untried else 0

    @property
    def shared_error(self) -> BaseException | None:
        """The one reason why nothing at all could be done; None if there is none."""
        is_shared = all(isinstance(error, FATAL_ERRORS) for _, error in self.failed)
        has_done = self.deleted or self.unknown or self.is_interrupted
        return self.failed[0][1] if self.failed and is_shared and not has_done else None

    def to_dict(self) -> dict[str, Any]:
        """The official shape, and the paths of all."""
        failed = [
            {"tinker_path": path, "error": describe_error(error).message}
            for path, error in self.failed
        ]
        return {
            "deleted_count": len(self.deleted),
            "failed": failed,
            "deleted": self.deleted,
            "unknown": self.unknown,
            "not_tried": self.untried,
            "interrupted": self.is_interrupted,
        }

    def to_text(self) -> str:
        """The same for people; what is gone is counted, what may be left is named."""
        lines = [f"Deleted {format_count(len(self.deleted), 'checkpoint')}."]
        if self.is_interrupted:
            lines.insert(0, "Interrupted.")
            lines += [f"  {escape_line(path)}" for path in self.deleted]
        groups = (
            (
                "Failed to delete",
                [f"{path}: {describe_error(why).message}" for path, why in self.failed],
            ),
            ("No answer came, so it may or may not be deleted", self.unknown),
            ("Not deleted", self.untried),
        )
        for title, items in groups:
            if items:
                lines.append(f"{title} ({len(items):,}):")
                lines += [f"  {escape_line(item)}" for item in items]
        return "\n".join(lines)


class BulkDeletion:
    """Sends deletions, some at once, and remembers what was sent."""

    def __init__(self, send: Callable[[str], Future[None]], paths: Sequence[str]) -> None:
        """`send` begins to delete one; `paths` are all different."""
        self._send = send
        self._paths = paths
        self._sent: dict[str, Future[None] | None] = {}
        self._has_fatal_error = False
        self._is_interrupted = False

    def run(self, on_progress: Callable[[int], None] = lambda num_done: None) -> DeletionResult:
        """Delete all; `told` is given how many more are done. Ctrl-C ends it with an outcome."""
        # Late: help must be quick.
        from concurrent.futures import wait

        try:
            self._send_all(on_progress)
        except KeyboardInterrupt:
            self._is_interrupted = True
            with contextlib.suppress(KeyboardInterrupt):
                wait([future for future in self._sent.values() if future], SETTLE_SECONDS)
        return self._collect_results()

    def _send_all(self, on_progress: Callable[[int], None]) -> None:
        under_way: set[Future[None]] = set()
        for path in self._paths:
            if len(under_way) >= MAX_IN_FLIGHT:
                under_way = self._await_some(under_way, on_progress)
            if self._has_fatal_error:
                break
            # Noted before it is sent: an interrupt in between must not call it untouched.
            self._sent[path] = None
            self._sent[path] = future = self._send_one(path)
            under_way.add(future)
        while under_way:
            under_way = self._await_some(under_way, on_progress)

    def _send_one(self, path: str) -> Future[None]:
        try:
            return self._send(path)
        except TinkexError as error:
            from concurrent.futures import Future

            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused

    def _await_some(
        self, under_way: set[Future[None]], on_progress: Callable[[int], None]
    ) -> set[Future[None]]:
        from concurrent.futures import FIRST_COMPLETED, wait

        done, left = wait(under_way, return_when=FIRST_COMPLETED)
        self._has_fatal_error |= any(
            isinstance(future.exception(), FATAL_ERRORS) for future in done
        )
        on_progress(len(done))
        return left

    def _collect_results(self) -> DeletionResult:
        deleted: list[str] = []
        failed: list[tuple[str, BaseException]] = []
        unknown: list[str] = []
        for path, future in self._sent.items():
            if future is None or not future.done():
                unknown.append(path)
            elif (error := future.exception()) is not None:
                failed.append((path, error))
            else:
                deleted.append(path)
        return DeletionResult(
            deleted=deleted,
            failed=failed,
            unknown=unknown,
            untried=[path for path in self._paths if path not in self._sent],
            is_interrupted=self._is_interrupted,
        )


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
