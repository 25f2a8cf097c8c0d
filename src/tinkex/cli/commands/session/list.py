"""`tinkex session list`, `info`, `finish` and `export-trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tinkex.cli.client import call_endpoint, has_no_records, rest_client
from tinkex.cli.context import Context, pass_context
from tinkex.cli.id_arguments import SESSION, SESSION_SUMMARY, resolve_session
from tinkex.cli.options import (
    Argument,
    Command,
    KeyValuePair,
    columns_option,
    limit_option,
)
from tinkex.cli.output import announce, show
from tinkex.cli.output.sessions import SESSION_COLUMNS, SessionList
from tinkex.cli.progress import paged_progress_bar, progress_bar, spinner

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

STATUSES = ("active", "finished", "failed", "cancelled")


@click.command("list", cls=Command)
@limit_option()
@columns_option({name: column.summary for name, column in SESSION_COLUMNS.items()})
@click.option(
    "--status",
    "statuses",
    type=click.Choice(STATUSES),
    multiple=True,
    help="Only sessions in this state; may be repeated.",
)
@click.option(
    "--project-id",
    "project_ids",
    multiple=True,
    metavar="ID",
    help="Only sessions of this project; may be repeated.",
)
@click.option("--name", metavar="WORDS", help="Only sessions with these words in their name.")
@click.option(
    "--metadata",
    type=KeyValuePair(),
    multiple=True,
    metavar="KEY=VALUE",
    help="Only sessions with this metadata; may be repeated.",
)
@click.option(
    "--scope",
    type=click.Choice(["owned", "accessible"]),
    default="owned",
    show_default=True,
    help="Only your own sessions, or all that you can access.",
)
@pass_context
def list_sessions(
    context: Context, /, limit: int, columns: tuple[str, ...] | None, **filters: Any
) -> None:
    """List sessions, newest first."""
    if has_no_records(context):
        show(context, SessionList([], False, columns))
        return
    from tinkex.cli.commands.session.find import SessionFilter, find_sessions

    with (
        rest_client(context) as client,
        paged_progress_bar(context, "Fetching sessions") as on_progress,
    ):
        page = find_sessions(client, SessionFilter(**filters), limit, on_progress)
    show(context, SessionList(page.sessions, page.has_more, columns))


@click.command(cls=Command)
@click.argument("session_id", type=SESSION, cls=Argument, summary=SESSION_SUMMARY)
@click.option(
    "--scope",
    type=click.Choice(["owned", "accessible"]),
    default="owned",
    show_default=True,
    help="One of your own sessions, or any that you can access.",
)
@pass_context
def info(context: Context, session_id: str, scope: Literal["owned", "accessible"]) -> None:
    """Show one session with its status, training runs and samplers."""
    from tinkex.cli.commands.session.find import find_session
    from tinkex.cli.output.sessions import SessionInfo

    with rest_client(context) as client:
        session_id = resolve_session(client, session_id)
        session = find_session(client, session_id, scope)
    show(context, SessionInfo(session))


@click.command(cls=Command)
@click.argument("session_id", type=SESSION, cls=Argument, summary=SESSION_SUMMARY)
@click.option(
    "--status",
    type=click.Choice(["success", "errored", "interrupted"]),
    default="interrupted",
    show_default=True,
    help="Final status; ignored if the session already has one.",
)
@click.option("--detail", metavar="TEXT", help="Note that is stored with the session.")
@pass_context
def finish(context: Context, session_id: str, status: str, detail: str | None) -> None:
    """Finish a session on the server.

    A client that is still running can no longer use it. Checkpoints and training runs stay.
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
    help=f"Output file or directory.  [default: ./SESSION_ID{TRACE_SUFFIX}]",
)
@click.option("--url-only", is_flag=True, help="Print the download URL instead of downloading.")
@pass_context
def export_trace(context: Context, session_id: str, output: Path | None, url_only: bool) -> None:
    """Download a session's timeline as a Perfetto trace.

    The trace contains the waiting and running time of each training and sampling request. Open the
    file in https://ui.perfetto.dev. The file is created when the download is complete.
    """
    from tinkex.cli.commands.session.find import session_not_found_error
    from tinkex.cli.output.sessions import TraceExport
    from tinkex.errors import NotFoundError

    try:
        with rest_client(context) as client:
            session_id = resolve_session(client, session_id)
            path = _output_path(session_id, output)
            with spinner(f"Exporting the trace of session {session_id} ..."):
                url = client.export_session_trace(session_id).result()
            size = None if url_only else _download_trace(context, client, url, path)
    except NotFoundError as error:
        raise session_not_found_error(session_id) from error
    if not url_only:
        show(context, TraceExport(session_id, destination=str(path), file_size_bytes=size))
    elif context.is_json:
        show(context, TraceExport(session_id, url=url))
    else:
        # Plain output, for curl "$(tinkex session export-trace ID --url-only)".
        click.echo(url)


def _output_path(session_id: str, output: Path | None) -> Path:
    name = Path(session_id).name + TRACE_SUFFIX
    if output is None:
        return Path.cwd() / name
    return output / name if output.is_dir() else output


def _download_trace(context: Context, client: RestClient, url: str, path: Path) -> int:
    """Download a URL; download_file() resumes and verifies the size."""
    from tinkex.client.download.directory import download_file

    holder = client.holder
    timeout = holder.config.timeout_seconds
    with progress_bar(context, "Downloading trace", unit="bytes") as bar:
        work = download_file(
            lambda url, headers: holder.transport.stream(url, headers, timeout),
            url,
            path,
            progress=bar.update,
            max_unsized_bytes=holder.config.max_unsized_download_bytes,
        )
        holder.start(work).result()
    return path.stat().st_size
