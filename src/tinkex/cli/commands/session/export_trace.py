"""`tinkex session export-trace`: a session's timeline in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.client import rest_client
from tinkex.cli.completing import SESSION, SESSION_SUMMARY
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Argument, Command
from tinkex.cli.output import show
from tinkex.cli.progress import progress_bar, spinner
from tinkex.cli.short_ids import resolve_session

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

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
    from tinkex.cli.commands.session.searching import session_not_found_error
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
    from tinkex.client.download import download_file

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
