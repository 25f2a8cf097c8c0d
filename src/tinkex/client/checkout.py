"""Fetching a checkpoint: its files by signed URLs, or an archive from an older server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tinkex.client.archive import Progress, extract_archive, publish_directory
from tinkex.client.download import download_file, download_tree
from tinkex.client.holder import Holder
from tinkex.client.http import HttpResponse, HttpStream
from tinkex.client.retry import retry_after
from tinkex.errors import APIStatusError, DownloadError, InvalidInput
from tinkex.ids import TinkerPath
from tinkex.logs import get_logger
from tinkex.wire.endpoints import CHECKPOINT_ARCHIVE, EXTERNAL_WEIGHTS_URLS

logger = get_logger(__name__)

#: Answers of a server that offers archives instead of single files.
NO_FILES = frozenset({400, 404, 405, 422})
#: How often, and how long apart, to ask for an archive that is still being built.
BUILD_TRIES = 7
BUILD_WAIT_SECONDS = 30.0


async def download_checkpoint(
    holder: Holder,
    path: TinkerPath,
    destination: Path,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Fetch a checkpoint into `destination`, which appears when everything is there."""
    if destination.exists() and not force:
        raise InvalidInput(f"{str(destination)!r} exists already; pass force=True to replace it")
    await holder.ready()
    ids = {"training_run_id": path.run_id, "checkpoint_id": path.checkpoint_id}
    try:
        reply = await holder.transport.call(EXTERNAL_WEIGHTS_URLS, ids=ids)
    except APIStatusError as error:
        if error.status not in NO_FILES:
            raise
        no_files = error
    else:
        files = dict(reply.urls)
        return await download_tree(
            _fetcher(holder), files, destination, force=force, progress=progress
        )
    try:
        url = await _archive_url(holder, ids)
    except APIStatusError as error:
        # Neither form exists: the first answer says why better than the second.
        raise (no_files if error.status in NO_FILES else error) from error
    return await _unpack(holder, url, destination, force, progress)


async def _unpack(
    holder: Holder, url: str, destination: Path, force: bool, progress: Progress | None
) -> Path:
    archive = destination.with_name(f".{destination.name}.archive")
    fresh = destination.with_name(f".{destination.name}.unpacked")
    await download_file(_fetcher(holder), url, archive, progress=progress)
    # Left behind by a process that died between unpacking and renaming.
    await asyncio.to_thread(shutil.rmtree, fresh, ignore_errors=True)
    try:
        await asyncio.to_thread(extract_archive, archive, fresh)
        await asyncio.to_thread(publish_directory, fresh, destination, replace=force)
    except OSError as error:
        text = f"{str(destination)!r} could not be put in place: {error.strerror or error}"
        raise DownloadError(text) from error
    finally:
        archive.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, fresh, ignore_errors=True)
    return destination


async def _archive_url(holder: Holder, ids: Mapping[str, str]) -> str:
    """Where the archive is: in a JSON answer, behind a redirect, or the endpoint itself."""
    url = holder.config.base_url + CHECKPOINT_ARCHIVE.url_path(**ids)
    for attempt in range(1, BUILD_TRIES + 1):
        headers = await holder.transport.headers_for(url)
        async with holder.transport.http.stream(url, headers, 60.0) as stream:
            if stream.status == 200:
                return await _named_url(holder, stream) or url
            error = holder.transport.error_of(await _whole(stream))
            if stream.status != 503 or attempt == BUILD_TRIES:
                raise error
            wait = retry_after(stream.headers) or BUILD_WAIT_SECONDS
        logger.info("The archive is being built; asking again in %.0f s", wait)
        await asyncio.sleep(wait)
    raise AssertionError("unreachable: the last try returns or raises")


async def _named_url(holder: Holder, stream: HttpStream) -> str | None:
    if not stream.headers.get("content-type", "").startswith("application/json"):
        return None
    return holder.transport.read(CHECKPOINT_ARCHIVE, await _whole(stream)).url


async def _whole(stream: HttpStream) -> HttpResponse:
    content = b"".join([piece async for piece in stream.chunks()])
    return HttpResponse(stream.status, stream.headers, content)


def _fetcher(
    holder: Holder,
) -> Callable[[str, Mapping[str, str]], AbstractAsyncContextManager[HttpStream]]:
    """A GET that carries the credential to our server, and to nobody else."""
    timeout = holder.config.timeout_seconds

    def fetch(url: str, headers: Mapping[str, str]) -> AbstractAsyncContextManager[HttpStream]:
        return holder.transport.stream(url, headers, timeout)

    return fetch
