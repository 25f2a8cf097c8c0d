"""`tinkex checkpoint download`: fetch a checkpoint's files, exporting it first if needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.client import rest_client, service_client
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError, Interrupted
from tinkex.cli.id_arguments import CHECKPOINT, expand_path
from tinkex.cli.options import Command
from tinkex.cli.output import show
from tinkex.cli.progress import ProgressBar, print_status, progress_bar, spinner
from tinkex.errors import APIStatusError, TinkexError
from tinkex.ids import TinkerPath, parse_tinker_path

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

#: TTL of an export made for one download; normally it is deleted right after.
EXPORT_TTL_SECONDS = 6 * 3600
#: Name of the checkpoints created by such exports.
EXPORT_CHECKPOINT_NAME = "download"
#: Message after Ctrl-C if the download can be resumed.
INTERRUPTED_MESSAGE = "Interrupted: the downloaded part is kept."
RESUME_HINT = "Run the same command again to resume the download."


class DownloadProgressBars:
    """Progress bars of a download: bytes received, then files unpacked."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stack = contextlib.ExitStack()
        self._label = ""
        self._bar = ProgressBar()

    def __enter__(self) -> DownloadProgressBars:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def on_bytes(self, done: int, total: int | None) -> None:
        """Update the number of bytes received."""
        self._show("Downloading", is_bytes=True).update(done, total)

    def on_files(self, done: int, total: int | None) -> None:
        """Update the number of files unpacked."""
        self._show("Unpacking", is_bytes=False).update(done, total)

    def _show(self, label: str, *, is_bytes: bool) -> ProgressBar:
        if label != self._label:
            self._stack.close()
            bar = progress_bar(self._context, label, unit="bytes" if is_bytes else "items")
            self._bar, self._label = self._stack.enter_context(bar), label
        return self._bar


def check_not_exists(destination: Path, *, force: bool) -> None:
    """Raise CliError if the destination exists, before any request is sent."""
    if not force and os.path.lexists(destination):
        raise CliError(
            f"{destination} already exists",
            "--force replaces it when the download is complete; --output selects another place.",
        )


def fetch_checkpoint(
    context: Context,
    path: str,
    destination: Path,
    *,
    force: bool = False,
    extract: bool = True,
    keeps_partial: bool = True,
    identity: Path | None = None,
) -> None:
    """Download a checkpoint to a folder, or with `extract=False` as an archive."""
    try:
        with rest_client(context) as client:
            _download(
                client,
                path,
                destination,
                DownloadProgressBars(context),
                force=force,
                extract=extract,
                identity=identity,
            )
            return
    except APIStatusError as error:
        if not extract or not _can_be_exported(context, path, error):
            raise
    except KeyboardInterrupt as error:
        if keeps_partial and _has_partial_download(destination):
            raise Interrupted(INTERRUPTED_MESSAGE, RESUME_HINT) from error
        raise
    _export_and_download(context, path, destination, force=force)


def _download(
    client: RestClient,
    path: str,
    destination: Path,
    bars: DownloadProgressBars,
    *,
    force: bool,
    extract: bool = True,
    identity: Path | None = None,
) -> None:
    with bars:
        client.download_checkpoint(
            path,
            destination,
            force=force,
            extract=extract,
            identity=identity,
            progress=bars.on_bytes,
            unpacked=bars.on_files,
        ).result()


def _has_partial_download(destination: Path) -> bool:
    from tinkex.client.download.directory import staging_path
    from tinkex.client.download.partial_file import PART_SUFFIX

    part = destination.with_name(destination.name + PART_SUFFIX)
    return staging_path(destination).exists() or part.exists()


def _can_be_exported(context: Context, path: str, error: APIStatusError) -> bool:
    """Whether the checkpoint must be exported before its files can be downloaded."""
    from tinkex.client.download.checkpoint import FILES_UNSUPPORTED_STATUSES

    if (
        error.status not in FILES_UNSUPPORTED_STATUSES
        or parse_tinker_path(path).segment != "weights"
    ):
        return False
    try:
        with rest_client(context) as client:
            client.get_weights_info_by_tinker_path(path).result()
    except TinkexError:
        # The checkpoint does not exist; the first error already reports that.
        return False
    return True


def _export_and_download(context: Context, path: str, destination: Path, *, force: bool) -> None:
    """Have the server load a training checkpoint and save it as files; download these."""
    with service_client(context) as client:
        with spinner(f"Exporting {path}: the server loads it and writes its files ..."):
            trainer = client.create_training_client_from_state(
                path, user_metadata={"created_by": "tinkex checkpoint download"}
            ).result()
            saving = trainer.save_weights_external(
                EXPORT_CHECKPOINT_NAME, ttl_seconds=EXPORT_TTL_SECONDS
            )
            copy = saving.result().path
        files = client.rest_client()
        try:
            _download(files, copy, destination, DownloadProgressBars(context), force=force)
        finally:
            _delete_copy(files, copy)


def _delete_copy(client: RestClient, path: str) -> None:
    try:
        client.delete_checkpoint_from_tinker_path(path).result()
    except TinkexError as error:
        hours = EXPORT_TTL_SECONDS // 3600
        print_status(f"The temporary export {path} could not be deleted: {error.message}")
        print_status(f"It expires within {hours} hours.")


@contextlib.contextmanager
def scratch_directory(destination: Path) -> Iterator[Path]:
    """Create a temporary directory next to the destination; delete it on exit."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    import shutil
    import tempfile

    scratch = tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent)
    try:
        yield Path(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="DIR",
    help="Directory in which to create the checkpoint's folder.  [default: current directory]",
)
@click.option(
    "--force", is_flag=True, help="Replace an existing folder when the download is complete."
)
@click.option("--no-extract", is_flag=True, help="Save the server's archive without unpacking it.")
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

    PATH is a checkpoint path such as tinker://RUN_ID/weights/0001. Its folder is named
    RUN_ID_weights_0001, with _ for every colon, and is created when all files are downloaded and
    verified. After an interruption, the same command resumes the download.
    """
    from tinkex.cli.output.checkpoints import CheckpointDownload, FileTotals

    path = expand_path(context, path)
    name = checkpoint_folder_name(parse_tinker_path(path))
    destination = output / (f"{name}.tar" if no_extract else name)
    check_not_exists(destination, force=force)
    fetch_checkpoint(
        context, path, destination, force=force, extract=not no_extract, identity=identity
    )
    show(context, CheckpointDownload(path, destination, FileTotals.measure(destination)))


def checkpoint_folder_name(path: TinkerPath) -> str:
    """Return the folder name of a checkpoint; not all systems allow colons in names."""
    return f"{path.run_id}_{path.segment}_{path.name}".replace(":", "_")
