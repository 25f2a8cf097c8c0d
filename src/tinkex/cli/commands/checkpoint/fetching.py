"""Getting a checkpoint's files onto this disk, whichever way its server offers."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli.client import rest, service
from tinkex.cli.context import Context
from tinkex.cli.errors import CliError, Interrupted
from tinkex.cli.progress import Bar, bar, tell, waiting
from tinkex.errors import APIStatusError, TinkexError
from tinkex.ids import parse_tinker_path

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

#: How long a copy lives that is made for one download; it is deleted when that is over.
EXPORT_TTL_SECONDS = 6 * 3600
#: What the checkpoints of such copies are called.
EXPORT_NAME = "download"
#: What to say after Ctrl-C if the next try need not begin anew.
KEPT = "Interrupted: what has arrived is kept."
RESUMES = "Run the same command again to resume the download."


class Phases:
    """The bars of a download: bytes that arrive, then files that come out of an archive."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stack = contextlib.ExitStack()
        self._label = ""
        self._bar = Bar()

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def received(self, done: int, total: int | None) -> None:
        """So many bytes are here."""
        self._show("Downloading", is_bytes=True).update(done, total)

    def unpacked(self, done: int, total: int | None) -> None:
        """So many files are out of the archive."""
        self._show("Unpacking", is_bytes=False).update(done, total)

    def _show(self, label: str, *, is_bytes: bool) -> Bar:
        if label != self._label:
            self._stack.close()
            shown = bar(self._context, label, unit="bytes" if is_bytes else "items")
            self._bar, self._label = self._stack.enter_context(shown), label
        return self._bar


def check_free(destination: Path, *, force: bool) -> None:
    """Refuse a place that is taken, before anybody is asked for anything."""
    if not force and os.path.lexists(destination):
        raise CliError(
            f"{destination} exists already",
            "--force replaces it once everything has arrived; --output names another place.",
        )


def fetch(
    context: Context,
    path: str,
    destination: Path,
    *,
    force: bool = False,
    extract: bool = True,
    is_kept: bool = True,
    identity: Path | None = None,
) -> None:
    """Download a checkpoint: into a folder, or as one archive; kept, if the caller keeps it."""
    try:
        with rest(context) as client:
            options = {"force": force, "extract": extract, "identity": identity}
            _download(context, client, path, destination, options)
            return
    except APIStatusError as error:
        if not extract or not _may_be_exported(context, path, error):
            raise
    except KeyboardInterrupt as error:
        if is_kept and _is_begun(destination):
            raise Interrupted(KEPT, RESUMES) from error
        raise
    _fetch_exported(context, path, destination, force=force)


def _download(
    context: Context,
    client: RestClient,
    path: str,
    destination: Path,
    options: Mapping[str, Any],
) -> None:
    with Phases(context) as phases:
        client.download_checkpoint(
            path,
            destination,
            **options,
            progress=phases.received,
            unpacked=phases.unpacked,
        ).result()


def _is_begun(destination: Path) -> bool:
    from tinkex.client.download import staging_path
    from tinkex.client.partial_file import PART_SUFFIX

    part = destination.with_name(destination.name + PART_SUFFIX)
    return staging_path(destination).exists() or part.exists()


def _may_be_exported(context: Context, path: str, error: APIStatusError) -> bool:
    """Whether the server gives out such files only after it was asked to write them."""
    from tinkex.client.checkout import FILES_UNSUPPORTED_STATUSES

    if (
        error.status not in FILES_UNSUPPORTED_STATUSES
        or parse_tinker_path(path).segment != "weights"
    ):
        return False
    try:
        with rest(context) as client:
            client.get_weights_info_by_tinker_path(path).result()
    except TinkexError:
        # There is no such checkpoint: the first answer has said so.
        return False
    return True


def _fetch_exported(context: Context, path: str, destination: Path, *, force: bool) -> None:
    """Have a training checkpoint loaded and written as files, and download these."""
    with service(context) as client:
        with waiting(f"Exporting {path}: the server loads it to write its files ..."):
            trainer = client.create_training_client_from_state(
                path, user_metadata={"created_by": "tinkex checkpoint download"}
            )
            saving = trainer.save_weights_external(EXPORT_NAME, ttl_seconds=EXPORT_TTL_SECONDS)
            copy = saving.result().path
        files = client.rest_client()
        try:
            _download(context, files, copy, destination, {"force": force})
        finally:
            _delete(context, files, copy)


def _delete(context: Context, client: RestClient, path: str) -> None:
    try:
        client.delete_checkpoint_from_tinker_path(path).result()
    except TinkexError as error:
        hours = EXPORT_TTL_SECONDS // 3600
        say(context, f"{path} was made for this and could not be deleted: {error.message}")
        say(context, f"It expires within {hours} hours.")


def say(context: Context, text: str) -> None:
    """Tell a person; programs get JSON on stderr if anything goes wrong, and nothing beside it."""
    if not context.is_json:
        tell(text)


@contextlib.contextmanager
def scratch_beside(destination: Path) -> Iterator[Path]:
    """A folder on the disk of a destination, which is gone at the end whatever happens."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)
