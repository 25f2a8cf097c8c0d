"""Download a checkpoint: single files by signed URLs, or an archive from older servers."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tinkex import clock
from tinkex.checkpoint.encryption import AGE_SUFFIX as ENCRYPTED_SUFFIX
from tinkex.checkpoint.encryption import decrypt_directory, read_identities
from tinkex.checkpoint.manifest import check_manifest, read_manifest
from tinkex.client.download.archive import ProgressCallback, exclusive_lock, extract_archive
from tinkex.client.download.directory import (
    check_destination,
    download_directory,
    download_file,
    staging_path,
)
from tinkex.client.holder import Holder
from tinkex.client.http import HttpStream
from tinkex.client.retry import parse_retry_after
from tinkex.errors import APIStatusError, CheckpointError, DownloadError, InvalidInput
from tinkex.ids import TinkerPath
from tinkex.logs import get_logger
from tinkex.system.atomic import publish_directory
from tinkex.types import ExternalWeightsUrlsResponse
from tinkex.wire.endpoints import CHECKPOINT_ARCHIVE, EXTERNAL_WEIGHTS_URLS

logger = get_logger(__name__)

#: Statuses of a server that offers archives instead of single files.
FILES_UNSUPPORTED_STATUSES = frozenset({400, 404, 405, 422})
#: Number and interval of requests for an archive that is still being built.
MAX_ARCHIVE_REQUESTS = 7
ARCHIVE_WAIT_SECONDS = 30.0
#: Maximum size of the response that contains the URL of an archive.
MAX_ARCHIVE_REPLY_BYTES = 2**20
#: How long before their expiry URLs are renewed.
URL_RENEWAL_MARGIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadOptions:
    """Where and how to store a downloaded checkpoint."""

    destination: Path
    force: bool = False
    """Replace an existing directory, once the download is complete."""
    progress: ProgressCallback | None = None
    """Called with the number of bytes received."""
    unpack_progress: ProgressCallback | None = None
    """Called with the number of files extracted from an archive."""
    identity: Path | None = None
    """A file of secret keys that decrypts an encrypted checkpoint; None leaves it encrypted."""


async def download_checkpoint(holder: Holder, path: TinkerPath, options: DownloadOptions) -> Path:
    """Download a checkpoint into a directory, which is created when it is complete."""
    destination = check_destination(options.destination, force=options.force)
    identities = _read_identities(options)
    await holder.ready()
    ids = checkpoint_ids(path)
    try:
        reply = await holder.transport.call(EXTERNAL_WEIGHTS_URLS, ids=ids)
    except APIStatusError as error:
        if error.status not in FILES_UNSUPPORTED_STATUSES:
            raise
        files_error = error
    else:
        urls = _SignedUrls(holder, ids, reply)
        if identities:
            return await _fetch_encrypted(urls, destination, options, identities)
        return await _fetch_files(urls, destination, options)
    try:
        url = await _archive_url(holder, ids)
    except APIStatusError as error:
        # Neither form exists: the first error is more specific.
        raise (files_error if error.status in FILES_UNSUPPORTED_STATUSES else error) from error
    return await _fetch_archive(holder, url, destination, options)


def _read_identities(options: DownloadOptions) -> list[object]:
    """Read the secret keys."""
    return [] if options.identity is None else read_identities(options.identity)


async def download_archive(holder: Holder, path: TinkerPath, options: DownloadOptions) -> Path:
    """Download a checkpoint as one archive file."""
    if options.identity is not None:
        raise InvalidInput("identity decrypts extracted files only; it cannot decrypt an archive")
    if os.path.lexists(options.destination) and not options.force:
        raise InvalidInput(f"{str(options.destination)!r} exists already")
    await holder.ready()
    url = await _archive_url(holder, checkpoint_ids(path))
    return await download_file(
        _authenticated_fetch(holder),
        url,
        options.destination,
        progress=options.progress,
        max_unsized_bytes=holder.config.max_unsized_download_bytes,
    )


def checkpoint_ids(path: TinkerPath) -> dict[str, str]:
    """Return the path parameters of a checkpoint's endpoints."""
    return {"training_run_id": path.run_id, "checkpoint_id": path.checkpoint_id}


# --- single files -----------------------------------------------------------------------------


class _SignedUrls:
    """The signed URLs of a checkpoint's files, renewed before they expire."""

    def __init__(
        self, holder: Holder, ids: Mapping[str, str], reply: ExternalWeightsUrlsResponse
    ) -> None:
        self._holder = holder
        self._ids = ids
        self._renewal_lock = asyncio.Lock()
        self._update(reply)

    def _update(self, reply: ExternalWeightsUrlsResponse) -> None:
        self._reply = reply
        # On the monotonic clock: the wall clock may jump during the download.
        seconds = _as_utc(reply.expires).timestamp() - clock.wall_now() - URL_RENEWAL_MARGIN_SECONDS
        self._renew_at = clock.elapsed() + seconds

    @property
    def max_unsized_bytes(self) -> int:
        """The client's limit for files of undeclared size."""
        return self._holder.config.max_unsized_download_bytes

    @property
    def names(self) -> list[str]:
        """The names of the files."""
        return list(self._reply.urls)

    @asynccontextmanager
    async def fetch(self, name: str, headers: Mapping[str, str]) -> AsyncIterator[HttpStream]:
        """GET a file by its name."""
        url = await self._url(name)
        async with _authenticated_fetch(self._holder)(url, headers) as stream:
            yield stream

    async def _url(self, name: str) -> str:
        async with self._renewal_lock:
            if clock.elapsed() >= self._renew_at:
                self._update(
                    await self._holder.transport.call(EXTERNAL_WEIGHTS_URLS, ids=self._ids)
                )
        if name not in self._reply.urls:
            raise DownloadError(f"The server no longer offers {name!r}")
        return self._reply.urls[name]


def _as_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


async def _fetch_files(urls: _SignedUrls, destination: Path, options: DownloadOptions) -> Path:
    try:
        return await download_directory(
            urls.fetch,
            {name: name for name in urls.names},
            destination,
            force=options.force,
            progress=options.progress,
            max_unsized_bytes=urls.max_unsized_bytes,
        )
    finally:
        _remove_if_empty(staging_path(destination))


async def _fetch_encrypted(
    urls: _SignedUrls, destination: Path, options: DownloadOptions, identities: list[object]
) -> Path:
    """Download encrypted files into a hidden directory, decrypt and verify them, then rename it."""
    if not any(name.endswith(ENCRYPTED_SUFFIX) for name in urls.names):
        raise InvalidInput("an identity was given, but the checkpoint is not encrypted")
    encrypted = destination.with_name(f".{destination.name}.encrypted")
    await _fetch_files(urls, encrypted, replace(options, force=True))
    try:
        await asyncio.to_thread(_decrypt, encrypted, identities)
        await asyncio.to_thread(publish_directory, encrypted, destination, replace=options.force)
    except OSError as error:
        text = f"Cannot write {str(destination)!r}: {error.strerror or error}"
        raise DownloadError(text) from error
    finally:
        await asyncio.to_thread(shutil.rmtree, encrypted, ignore_errors=True)
    return destination


def _decrypt(folder: Path, identities: list[object]) -> None:
    try:
        decrypt_directory(folder, identities)
    except CheckpointError as error:
        text = f"Cannot decrypt the checkpoint: {error.message}"
        raise DownloadError(text, hint=error.hint) from error


# --- archives ---------------------------------------------------------------------------------


async def _fetch_archive(
    holder: Holder, url: str, destination: Path, options: DownloadOptions
) -> Path:
    """Download, extract and verify in a staging directory, locked against other downloads."""
    staging = staging_path(destination)
    try:
        staging.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(staging):
            await _download_and_unpack(holder, url, destination, options)
    except OSError as error:
        text = f"Cannot write {str(destination)!r}: {error.strerror or error}"
        raise DownloadError(text) from error
    return destination


async def _download_and_unpack(
    holder: Holder, url: str, destination: Path, options: DownloadOptions
) -> None:
    staging = staging_path(destination)
    archive, fresh = staging / "archive", staging / "files"
    try:
        await download_file(
            _authenticated_fetch(holder),
            url,
            archive,
            progress=options.progress,
            max_unsized_bytes=holder.config.max_unsized_download_bytes,
        )
        # Left behind by a process that was killed between extracting and renaming.
        await asyncio.to_thread(shutil.rmtree, fresh, ignore_errors=True)
        await _unpack(archive, fresh, options.unpack_progress or (lambda *_: None))
        await asyncio.to_thread(_verify_manifest, fresh)
        if identities := _read_identities(options):
            await asyncio.to_thread(_decrypt, fresh, identities)
        await asyncio.to_thread(publish_directory, fresh, destination, replace=options.force)
        # Includes partial files of an earlier attempt to download single files.
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
    finally:
        with suppress(FileNotFoundError):
            archive.unlink()
        shutil.rmtree(fresh, ignore_errors=True)
        _remove_if_empty(staging)


async def _unpack(archive: Path, fresh: Path, report: ProgressCallback) -> None:
    """Extract in a thread that stops soon after a cancellation: archives have gigabytes."""
    is_cancelled = threading.Event()
    num_files = 0

    def on_files(done: int) -> None:
        nonlocal num_files
        if is_cancelled.is_set():
            raise DownloadError("The extraction was cancelled")
        num_files = done
        report(done, None)

    work = asyncio.ensure_future(
        asyncio.to_thread(extract_archive, archive, fresh, on_files=on_files)
    )
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        is_cancelled.set()
        await asyncio.gather(work, return_exceptions=True)
        raise
    report(num_files, num_files)


def _verify_manifest(folder: Path) -> None:
    """Check files against their manifest, if there is one."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return
    try:
        check_manifest(folder)
    except CheckpointError as error:
        raise DownloadError(f"The archive does not match its manifest: {error.message}") from error


def _remove_if_empty(staging: Path) -> None:
    with suppress(OSError):  # it contains partial files for the next attempt
        staging.rmdir()


async def _archive_url(holder: Holder, ids: Mapping[str, str]) -> str:
    """Return the archive's URL: from a JSON response, or the (redirecting) endpoint itself."""
    url = holder.config.base_url + CHECKPOINT_ARCHIVE.url_path(**ids)
    for attempt in range(1, MAX_ARCHIVE_REQUESTS + 1):
        headers = await holder.transport.headers_for(url)
        async with holder.transport.http.stream(url, headers, 60.0) as stream:
            if stream.status == 200:
                return await _parse_archive_url(holder, stream) or url
            error = holder.transport.error_from_response(await stream.read(MAX_ARCHIVE_REPLY_BYTES))
            if stream.status != 503 or attempt == MAX_ARCHIVE_REQUESTS:
                raise error
            wait = parse_retry_after(stream.headers) or ARCHIVE_WAIT_SECONDS
        logger.info("The archive is being built; retrying in %.0f s", wait)
        await asyncio.sleep(wait)
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _parse_archive_url(holder: Holder, stream: HttpStream) -> str | None:
    if not stream.headers.get("content-type", "").startswith("application/json"):
        return None
    return holder.transport.decode_reply(
        CHECKPOINT_ARCHIVE, await stream.read(MAX_ARCHIVE_REPLY_BYTES)
    ).url


def _authenticated_fetch(
    holder: Holder,
) -> Callable[[str, Mapping[str, str]], AbstractAsyncContextManager[HttpStream]]:
    """Return a GET function that sends the credential to this client's server only."""
    timeout = holder.config.timeout_seconds

    def fetch(url: str, headers: Mapping[str, str]) -> AbstractAsyncContextManager[HttpStream]:
        return holder.transport.stream(url, headers, timeout)

    return fetch
