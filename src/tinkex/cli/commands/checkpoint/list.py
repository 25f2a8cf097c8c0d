"""`tinkex checkpoint list` and `info`, and the selection of checkpoints by filters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tinkex.cli.client import Listing, fetch_pages, has_no_records, rest_client
from tinkex.cli.commands.time_params import to_utc
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError
from tinkex.cli.format import UNKNOWN, escape_line, format_count, format_size, format_timestamp
from tinkex.cli.id_arguments import CHECKPOINT, RUN, expand_path, resolve_run
from tinkex.cli.options import Command, KeyValuePair, columns_option, limit_option
from tinkex.cli.output import show
from tinkex.cli.output.checkpoints import CHECKPOINT_COLUMNS, CheckpointInfo, CheckpointList
from tinkex.cli.progress import paged_progress_bar
from tinkex.errors import (
    APIStatusError,
    ExperimentalWarning,
    NotFoundError,
    PermissionDeniedError,
)
from tinkex.ids import SEGMENT_BY_TYPE, TYPE_BY_SEGMENT, parse_tinker_path

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.types import Checkpoint, CheckpointSearchRequest, CheckpointSearchResponse

PAGE_SIZE = 1000
SEARCH_PAGE_SIZE = 200
#: Status codes of a server without search.
NO_SEARCH = frozenset({404, 405, 501})
DEFAULT_LIMIT = 20


@click.command("list", cls=Command)
@click.option("--run-id", type=RUN, metavar="ID", help="List all checkpoints of this run.")
@limit_option(None, f"Maximum number of items to show; 0 shows all.  [default: {DEFAULT_LIMIT}]")
@columns_option({name: column.summary for name, column in CHECKPOINT_COLUMNS.items()})
@click.option(
    "--type",
    "checkpoint_type",
    type=click.Choice(list(SEGMENT_BY_TYPE)),
    help="Only checkpoints of this type.",
)
@click.option(
    "--base-model",
    "base_models",
    multiple=True,
    metavar="NAME",
    help="Only checkpoints of this base model; may be repeated.",
)
@click.option(
    "--metadata",
    "user_metadata",
    type=KeyValuePair(),
    multiple=True,
    metavar="KEY=VALUE",
    help="Only checkpoints with this metadata; may be repeated.",
)
@pass_context
def list_checkpoints(
    context: Context,
    /,
    run_id: str | None,
    limit: int | None,
    columns: tuple[str, ...] | None,
    **filters: Any,
) -> None:
    """List checkpoints, newest first."""
    if run_id is not None and any(filters.values()):
        raise click.UsageError("--run-id cannot be combined with other filters.")
    if run_id is None and has_no_records(context):
        show(context, CheckpointList(Listing([], 0), run_id, columns))
        return
    with rest_client(context) as client:
        if run_id is not None:
            run_id = resolve_run(client, run_id)
            checkpoints = _fetch_run_checkpoints(client, run_id, limit or 0)
        elif any(filters.values()):
            checkpoints = _search(client, filters, DEFAULT_LIMIT if limit is None else limit)
        else:
            checkpoints = fetch_checkpoints(
                context, client, DEFAULT_LIMIT if limit is None else limit
            )
    show(context, CheckpointList(checkpoints, run_id, columns))


def fetch_checkpoints(context: Context, client: RestClient, limit: int = 0) -> Listing[Checkpoint]:
    """Fetch the newest `limit` checkpoints of this key (0: all)."""

    def fetch_page(limit: int, offset: int) -> Listing[Checkpoint]:
        page = client.list_user_checkpoints(limit, offset).result()
        total = page.cursor.total_count if page.cursor else offset + len(page.checkpoints)
        return Listing(page.checkpoints, total)

    with paged_progress_bar(context, "Fetching checkpoints") as on_progress:
        return fetch_pages(fetch_page, limit, PAGE_SIZE, on_progress)


def _fetch_run_checkpoints(client: RestClient, run_id: str, limit: int) -> Listing[Checkpoint]:
    checkpoints = client.list_checkpoints(run_id).result().checkpoints
    return Listing(checkpoints[:limit] if limit else checkpoints, len(checkpoints))


def _search(client: RestClient, filters: dict[str, Any], limit: int) -> Listing[Checkpoint]:
    """Fetch the newest `limit` matching checkpoints (0: all), and count all."""
    from tinkex.types import CheckpointSearchRequest

    request = CheckpointSearchRequest(
        checkpoint_type=filters["checkpoint_type"],
        base_models=list(filters["base_models"]) or None,
        user_metadata=dict(filters["user_metadata"]),
        limit=SEARCH_PAGE_SIZE,
    )
    found: list[Checkpoint] = []
    while True:
        page = _search_page(client, request)
        found += page.checkpoints
        if page.next_cursor is None or not page.checkpoints:
            return Listing(found[:limit] if limit else found, len(found))
        request = request.model_copy(update={"cursor": page.next_cursor})


def _search_page(client: RestClient, request: CheckpointSearchRequest) -> CheckpointSearchResponse:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        future = client.search_checkpoints(request)
    try:
        return future.result()
    except APIStatusError as error:
        if error.status not in NO_SEARCH:
            raise
        raise CliError(
            "this server cannot search checkpoints",
            "Remove --type, --base-model and --metadata to list all checkpoints.",
        ) from error


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@pass_context
def info(context: Context, path: str) -> None:
    """Show one checkpoint.

    PATH is a checkpoint path such as tinker://RUN_ID/weights/0001.
    """
    path = expand_path(context, path)
    run_id = parse_tinker_path(path).run_id
    with rest_client(context) as client:
        future = client.get_training_run(run_id)
        saved = find_checkpoint(client, path)
        run = future.result()
    show(context, CheckpointInfo(saved, run))


def find_checkpoint(client: RestClient, path: str) -> Checkpoint:
    """Return the checkpoint with this path; raise CliError if it does not exist."""
    run_id = parse_tinker_path(path).run_id
    for saved in client.list_checkpoints(run_id).result().checkpoints:
        if saved.tinker_path == path:
            return saved
    raise CliError(
        f"Checkpoint not found: {path}",
        f"`tinkex checkpoint list --run-id {run_id}` lists the checkpoints of its run.",
    )


#: Accepted names of each checkpoint type: its name and its path segment.
CHECKPOINT_TYPES = {kind: kind for kind in TYPE_BY_SEGMENT.values()} | TYPE_BY_SEGMENT
#: Number of checkpoints listed in a confirmation; the others are counted.
MAX_LISTED = 20


class CheckpointFilter(NamedTuple):
    """Conditions on checkpoints; None matches everything."""

    run_id: str | None = None
    checkpoint_type: str | None = None
    before: datetime | None = None
    after: datetime | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no condition is set."""
        conditions = (self.run_id, self.checkpoint_type, self.before, self.after)
        return all(value is None for value in conditions)

    def matches(self, saved: Checkpoint) -> bool:
        """Whether a checkpoint fulfills the conditions other than the run id."""
        created = to_utc(saved.time)
        return (
            self.checkpoint_type in {None, saved.checkpoint_type}
            and (self.before is None or created < self.before)
            and (self.after is None or created > self.after)
        )


class SelectedCheckpoint(NamedTuple):
    """A selected path, and its checkpoint if the server has it."""

    path: str
    checkpoint: Checkpoint | None = None


def find_matching(
    context: Context, client: RestClient, filters: CheckpointFilter
) -> list[SelectedCheckpoint]:
    """Fetch all checkpoints that match the filters."""
    if filters.run_id is not None:
        checkpoints: Sequence[Checkpoint] = (
            client.list_checkpoints(filters.run_id).result().checkpoints
        )
    else:
        checkpoints = fetch_checkpoints(context, client).items
    return [
        SelectedCheckpoint(saved.tinker_path, saved)
        for saved in checkpoints
        if filters.matches(saved)
    ]


def fetch_selected(client: RestClient, paths: Sequence[str]) -> list[SelectedCheckpoint]:
    """Fetch the checkpoints of these paths; None for unknown ones."""
    run_ids = {parse_tinker_path(path).run_id for path in paths}
    futures = [client.list_checkpoints(run_id) for run_id in run_ids]
    known: dict[str, Checkpoint] = {}
    for future in futures:
        try:
            known |= {saved.tinker_path: saved for saved in future.result().checkpoints}
        except (NotFoundError, PermissionDeniedError):
            # The deletion reports this for each path.
            continue
    return [SelectedCheckpoint(path, known.get(path)) for path in paths]


def describe_selection(selected: Sequence[SelectedCheckpoint]) -> str:
    """Describe the checkpoints to delete, for the confirmation."""
    lines = [f"{format_count(len(selected), 'checkpoint')} ({format_total_size(selected)}):"]
    lines += [f"  {_describe_checkpoint(item)}" for item in selected[:MAX_LISTED]]
    if len(selected) > MAX_LISTED:
        lines.append(f"  and {len(selected) - MAX_LISTED:,} more")
    return "\n".join([*lines, "This cannot be undone."])


def format_total_size(selected: Iterable[SelectedCheckpoint]) -> str:
    """Format the total of the known sizes."""
    sizes = [item.checkpoint.size_bytes if item.checkpoint else None for item in selected]
    known = [size for size in sizes if size is not None]
    if not known:
        return "size unknown"
    return ("" if len(known) == len(sizes) else "at least ") + format_size(sum(known))


def _describe_checkpoint(item: SelectedCheckpoint) -> str:
    if item.checkpoint is None:
        return f"{escape_line(item.path)}\n    not found"
    size = format_size(item.checkpoint.size_bytes)
    details = [
        item.checkpoint.checkpoint_type,
        *([size] if size != UNKNOWN else []),
        format_timestamp(item.checkpoint.time),
        *(["public"] if item.checkpoint.public else []),
    ]
    return f"{escape_line(item.path)}\n    {', '.join(details)}"
