"""`tinkex checkpoint delete`: delete many checkpoints concurrently and report each result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

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
from tinkex.cli.id_arguments import CHECKPOINT, RUN, resolve_path, resolve_run
from tinkex.cli.options import Command
from tinkex.cli.output import announce
from tinkex.cli.progress import progress_bar
from tinkex.cli.prompts import confirm, exit_cancelled, yes_option
from tinkex.errors import APIConnectionError, AuthenticationError, TinkexError
from tinkex.ids import parse_tinker_path

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinkex.client.rest import RestClient

MAX_IN_FLIGHT = 32
#: How long an interrupted command waits for pending responses.
SETTLE_SECONDS = 2.0
#: Errors that affect all checkpoints alike.
FATAL_ERRORS = (APIConnectionError, AuthenticationError)


class DeletionResult(NamedTuple):
    """Paths of the checkpoints by outcome."""

    deleted: Sequence[str] = ()
    failed: Sequence[tuple[str, BaseException]] = ()
    unknown: Sequence[str] = ()
    """Deletions that were sent but not confirmed."""
    untried: Sequence[str] = ()
    is_interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 if all were deleted."""
        if self.is_interrupted:
            return INTERRUPTED
        return FAILED if self.failed or self.unknown or self.untried else 0

    @property
    def shared_error(self) -> BaseException | None:
        """The error that prevented every deletion; None if any was attempted successfully."""
        is_shared = all(isinstance(error, FATAL_ERRORS) for _, error in self.failed)
        has_done = self.deleted or self.unknown or self.is_interrupted
        return self.failed[0][1] if self.failed and is_shared and not has_done else None

    def to_dict(self) -> dict[str, object]:
        """The official JSON fields, plus the paths by outcome."""
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
        """A summary for people: deleted checkpoints are counted, the others are listed."""
        lines = [f"Deleted {format_count(len(self.deleted), 'checkpoint')}."]
        if self.is_interrupted:
            lines.insert(0, "Interrupted.")
            lines += [f"  {escape_line(path)}" for path in self.deleted]
        groups = (
            (
                "Failed to delete",
                [f"{path}: {describe_error(why).message}" for path, why in self.failed],
            ),
            ("No response, may or may not be deleted", self.unknown),
            ("Not deleted", self.untried),
        )
        for title, items in groups:
            if items:
                lines.append(f"{title} ({len(items):,}):")
                lines += [f"  {escape_line(item)}" for item in items]
        return "\n".join(lines)


class BulkDeletion:
    """Sends deletions concurrently and tracks which ones were sent."""

    def __init__(self, send: Callable[[str], Future[None]], paths: Sequence[str]) -> None:
        """`send` starts one deletion; `paths` must be unique."""
        self._send = send
        self._paths = paths
        self._sent: dict[str, Future[None] | None] = {}
        self._has_fatal_error = False
        self._is_interrupted = False

    def run(self, on_progress: Callable[[int], None] = lambda num_done: None) -> DeletionResult:
        """Delete all; `on_progress` gets the number of new completions. Ctrl-C returns early."""
        # Imported late to keep --help fast.
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
            # Recorded before sending, so that an interrupt in between reports it as unknown.
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
@click.option("--run-id", type=RUN, metavar="ID", help="Only checkpoints of this run.")
@click.option(
    "--type",
    "checkpoint_type",
    type=click.Choice(list(CHECKPOINT_TYPES)),
    metavar="TYPE",
    help="Only this type: training, sampler or external.",
)
@click.option(
    "--before",
    type=IsoDateTime(),
    metavar="DATE",
    help="Only checkpoints created before this date or time, such as 2026-01-31 (UTC).",
)
@click.option(
    "--after",
    type=IsoDateTime(),
    metavar="DATE",
    help="Only checkpoints created after this date or time (UTC).",
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
    """Delete checkpoints permanently.

    Select checkpoints by path or by filters; without --run-id, filters apply to all your runs. Asks
    for confirmation once, and continues if one of them cannot be deleted.

    \b
      tinkex checkpoint delete tinker://RUN_ID/weights/0001 tinker://RUN_ID/weights/0002
      tinkex checkpoint delete --run-id RUN_ID --type training --before 2026-01-31
    """
    kind = CHECKPOINT_TYPES[checkpoint_type] if checkpoint_type else None
    filters = CheckpointFilter(run_id=run_id, checkpoint_type=kind, before=before, after=after)
    if bool(paths) is not filters.is_empty:
        raise click.UsageError(
            "Give either paths, or at least one of --run-id, --type, --before and --after."
        )
    with rest_client(context) as client:
        paths = tuple(resolve_path(client, path) for path in paths)
        if run_id is not None:
            filters = filters._replace(run_id=resolve_run(client, run_id))
        result = _confirm_and_delete(
            context, client, _select(context, client, paths, filters, yes), yes
        )
    if result.shared_error is not None:
        raise result.shared_error
    if result != DeletionResult():
        announce(context, result.to_text(), result.to_dict())
    else:
        announce(context, "No checkpoints match; nothing was deleted.", result.to_dict())
    click.get_current_context().exit(result.exit_code)


def _select(
    context: Context,
    client: RestClient,
    paths: tuple[str, ...],
    filters: CheckpointFilter,
    yes: bool,
) -> list[SelectedCheckpoint]:
    if not paths:
        return find_matching(context, client, filters)
    unique = list(dict.fromkeys(paths))
    for path in unique:
        parse_tinker_path(path)
    # Details are only needed for the confirmation.
    return [SelectedCheckpoint(path) for path in unique] if yes else fetch_selected(client, unique)


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
    with progress_bar(context, "Deleting", len(selected)) as bar:
        return BulkDeletion(send, [item.path for item in selected]).run(bar.advance)
