"""`tinkex session list`: the sessions of this key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tinkex.cli.access import has_no_records
from tinkex.cli.client import rest_client
from tinkex.cli.context import Context, pass_context
from tinkex.cli.id_completion import SESSION, SESSION_SUMMARY
from tinkex.cli.options import Argument, Command, columns_option, limit_option
from tinkex.cli.output import announce, show
from tinkex.cli.output.sessions import SESSION_COLUMNS, SessionList
from tinkex.cli.progress import paged_progress_bar, progress_bar, spinner
from tinkex.cli.raw_requests import call_endpoint
from tinkex.cli.short_ids import resolve_session

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

STATUSES = ("active", "finished", "failed", "cancelled")


class KeyValuePair(click.ParamType[tuple[str, str]]):
    """A key and its value with = between them."""

    name = "pair"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Both parts."""
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is no pair; write it as KEY=VALUE", param, ctx)
        return key, text


@click.command("list", cls=Command)
@limit_option()
@columns_option({name: column.summary for name, column in SESSION_COLUMNS.items()})
@click.option(
    "--status",
    "statuses",
    type=click.Choice(STATUSES),
    multiple=True,
    help="Only sessions in this state; may be given more than once.",
)
@click.option(
    "--project-id", "project_ids", multiple=True, metavar="ID", help="Only of this project."
)
@click.option("--name", metavar="WORDS", help="Only with these words in their name.")
@click.option(
    "--metadata",
    type=KeyValuePair(),
    multiple=True,
    metavar="KEY=VALUE",
    help="Only with this metadata.",
)
@click.option(
    "--scope",
    type=click.Choice(["owned", "accessible"]),
    default="owned",
    show_default=True,
    help="Your own sessions, or all that you may see.",
)
@pass_context
def list_sessions(
    context: Context, limit: int, columns: tuple[str, ...] | None, **filters: Any
) -> None:
    """List sessions, newest first."""
    if has_no_records(context):
        show(context, SessionList([], False, columns))
        return
    from tinkex.cli.commands.session.find import SessionFilter, find_sessions

    with rest_client(context) as client, paged_progress_bar(context, "Fetching sessions") as told:
        found = find_sessions(client, SessionFilter(**filters), limit, told)
    show(context, SessionList(found.sessions, found.has_more, columns))


@click.command(cls=Command)
@click.argument("session_id", type=SESSION, cls=Argument, summary=SESSION_SUMMARY)
@click.option(
    "--scope",
    type=click.Choice(["owned", "accessible"]),
    default="owned",
    show_default=True,
    help="One of your own, or one that you may see.",
)
@pass_context
def info(context: Context, session_id: str, scope: Literal["owned", "accessible"]) -> None:
    """Show one session: how it is doing, its training runs and its samplers."""
    from tinkex.cli.commands.session.find import find_session
    from tinkex.cli.output.sessions import SessionInfo

    with rest_client(context) as client:
        session_id = resolve_session(client, session_id)
        found = find_session(client, session_id, scope)
    show(context, SessionInfo(found))


@click.command(cls=Command)
@click.argument("session_id", type=SESSION, cls=Argument, summary=SESSION_SUMMARY)
@click.option(
    "--status",
    type=click.Choice(["success", "errored", "interrupted"]),
    default="interrupted",
    show_default=True,
    help="How it ended; what a server was told first stays.",
)
@click.option("--detail", metavar="TEXT", help="A word about it, kept with the session.")
@pass_context
def finish(context: Context, session_id: str, status: str, detail: str | None) -> None:
    """End a session on the server.

    Its client, should it still run, can do no more work in it. Checkpoints and training runs stay.
    """
    from tinkex.cli.commands.session.find import session_not_found_error
    from tinkex.client.session import FINISH_REASONS
    from tinkex.errors import NotFoundError
    from tinkex.wire.endpoints import FINISH_SESSION
    from tinkex.wire.messages import FinishSessionRequest

    message = FinishSessionRequest(reason=FINISH_REASONS[status], detail=detail)
    try:
        with rest_client(context) as client:
            session_id = resolve_session(client, session_id)
            call_endpoint(client, FINISH_SESSION, message, {"session_id": session_id})
    except NotFoundError as error:
        raise session_not_found_error(session_id) from error
    announce(
        context,
        f"Session {session_id} is finished.",
        {"session_id": session_id, "finished": True, "status": status},
    )


TRACE_SUFFIX = ".pftrace"


@click.command("export-trace", cls=Command)
@click.argument("session_id", type=SESSION, cls=Argument, summary=SESSION_SUMMARY)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help=f"The file, or a directory for it; ./SESSION_ID{TRACE_SUFFIX} if not given.",
)
@click.option("--url-only", is_flag=True, help="Print the download URL and fetch nothing.")
@pass_context
def export_trace(context: Context, session_id: str, output: Path | None, url_only: bool) -> None:
    """Save a session's timeline as a Perfetto trace.

    The server writes down when each training and sampling request waited and ran. Open the file in
    https://ui.perfetto.dev. It gets its name when all of it has arrived.
    """
    from tinkex.cli.commands.session.find import session_not_found_error
    from tinkex.cli.output.sessions import TraceExport
    from tinkex.errors import NotFoundError

    try:
        with rest_client(context) as client:
            session_id = resolve_session(client, session_id)
            place = _output_path(session_id, output)
            with spinner(f"Exporting the trace of session {session_id} ..."):
                url = client.export_session_trace(session_id).result()
            size = None if url_only else _download_trace(context, client, url, place)
    except NotFoundError as error:
        raise session_not_found_error(session_id) from error
    if not url_only:
        show(context, TraceExport(session_id, destination=str(place), file_size_bytes=size))
    elif context.is_json:
        show(context, TraceExport(session_id, url=url))
    else:
        # Bare, for curl "$(tinkex session export-trace ID --url-only)".
        click.echo(url)


def _output_path(session_id: str, output: Path | None) -> Path:
    name = Path(session_id).name + TRACE_SUFFIX
    if output is None:
        return Path.cwd() / name
    return output / name if output.is_dir() else output


def _download_trace(context: Context, client: RestClient, url: str, place: Path) -> int:
    """Fetch a URL; download_file resumes, and compares the size with what was announced."""
    from tinkex.client.download.directory import download_file

    holder = client.holder
    timeout = holder.config.timeout_seconds
    with progress_bar(context, "Downloading trace", unit="bytes") as told:
        work = download_file(
            lambda url, headers: holder.transport.stream(url, headers, timeout),
            url,
            place,
            progress=told.update,
            max_unsized_bytes=holder.config.max_unsized_download_bytes,
        )
        holder.start(work).result()
    return place.stat().st_size
