"""Downloads: streamed, resumed after a break, checked, and visible only when complete."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tinkex.checkpoint.disk import is_disk_full
from tinkex.client.archive import (
    BLOCK_BYTES,
    NOTES,
    PART,
    Expected,
    Notes,
    Part,
    Progress,
    exclusive,
    publish_directory,
    recover_directory,
    safe_relative_path,
)
from tinkex.client.retry import RetryPolicy, backoff, retry_after, should_retry
from tinkex.errors import DownloadError, InvalidInput, TinkexError, Verdict, judge
from tinkex.logs import get_logger

logger = get_logger(__name__)

#: The file of a tree that lists the others with size and digest.
MANIFEST = "manifest.json"

_WAITS = RetryPolicy()
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")

Sleep = Callable[[float], Awaitable[object]]


class ResponseStream(Protocol):
    """An answer whose body has not been read yet; header names are in lower case."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    def chunks(self) -> AsyncIterator[bytes | bytearray | memoryview]: ...


#: GETs a URL with headers. When a line breaks: a retryable TinkexError, an OSError or an EOFError.
Fetch = Callable[[str, Mapping[str, str]], AbstractAsyncContextManager[ResponseStream]]


class _Broken(DownloadError):
    """This attempt failed; the next may not."""

    verdict = Verdict(is_user_error=False, is_retryable=True)
    retry_after_seconds: float | None = None


async def download_file(  # noqa: PLR0913 - each of these is for the caller to decide
    fetch: Fetch,
    url: str,
    destination: Path,
    *,
    expected_bytes: int | None = None,
    expected_sha256: str | None = None,
    progress: Progress | None = None,
    retries: int = 5,
    sleep: Sleep = asyncio.sleep,
) -> Path:
    """Fetch one file, going on where an earlier try stopped; it gets its name when complete.

    `retries` counts failures in a row that brought nothing new.
    """
    destination = Path(destination)
    if destination.is_dir():
        raise InvalidInput(f"{str(destination)!r} is a folder, not a place for a file")
    part = Part(destination, Expected(num_bytes=expected_bytes, sha256=expected_sha256))
    transfer = _Transfer(fetch, url, part, progress or (lambda *_: None))
    await transfer.complete(part.publish, retries, sleep)
    return destination


async def download_tree(  # noqa: PLR0913 - each of these is for the caller to decide
    fetch: Fetch,
    files: Mapping[str, str],
    destination_dir: Path,
    *,
    sizes: Mapping[str, int] | None = None,
    digests: Mapping[str, str] | None = None,
    force: bool = False,
    concurrency: int = 4,
    progress: Progress | None = None,
    retries: int = 5,
    sleep: Sleep = asyncio.sleep,
) -> Path:
    """Fetch files (path -> URL) into a new folder, which appears when all of them are there.

    After a failure the parts stay in `.<name>.partial`, and the next call goes on with them.
    """
    if concurrency < 1:
        raise InvalidInput(f"concurrency must be at least 1, got {concurrency}")
    _check_names(files)
    destination = check_destination(Path(destination_dir), force=force)
    staging = staging_for(destination)
    sizes, digests = sizes or {}, digests or {}
    expected = {n: Expected(num_bytes=sizes.get(n), sha256=digests.get(n)) for n in files}
    report = partial(_report_sum, expected, {}, progress or (lambda *_: None))
    gate = asyncio.Semaphore(concurrency)

    async def fetch_one(name: str) -> None:
        part = Part(staging / name, expected[name])
        transfer = _Transfer(fetch, files[name], part, partial(report, name))
        async with gate:
            await transfer.complete(part.seal, retries, sleep)

    await _on_disk(staging, partial(staging.mkdir, parents=True, exist_ok=True))
    with exclusive(staging):
        await _on_disk(staging, _tidy, staging, files)
        if MANIFEST in files:
            await fetch_one(MANIFEST)
            _learn(staging / (MANIFEST + PART), expected)
        await _all_or_first_error(fetch_one(name) for name in files if name != MANIFEST)
        await _on_disk(destination, _land, staging, files, destination, force)
    return destination


def _check_names(files: Mapping[str, str]) -> None:
    if not files:
        raise InvalidInput(f"There is nothing to download in {files!r}")
    paths = {name: safe_relative_path(name) for name in files}
    for name, path in paths.items():
        is_in_the_way = name.endswith((PART, NOTES)) or any(str(up) in files for up in path.parents)
        if is_in_the_way or str(path) != name:
            raise DownloadError(f"Refused the file name {name!r}: it would clash with another")


def staging_for(destination: Path) -> Path:
    """Where a folder is kept until it is complete."""
    return destination.with_name(f".{destination.name}.partial")


def check_destination(destination: Path, *, force: bool) -> Path:
    """The place for a folder, if it may be written; an interrupted replacement is undone first."""
    if destination.name in {"", ".."}:
        destination = destination.resolve()
    recover_directory(destination)
    if not os.path.lexists(destination):
        return destination
    if not force:
        hint = "With force it is replaced, once everything has arrived."
        raise InvalidInput(f"{str(destination)!r} exists already", hint=hint)
    if destination.is_symlink() or not destination.is_dir() or not destination.name:
        raise InvalidInput(f"{str(destination)!r} is not a folder that can be replaced")
    return destination


def _tidy(staging: Path, names: Mapping[str, str]) -> None:
    """Of what an earlier call has left, keep the parts of these files and nothing else."""
    parts = {name + suffix for name in names for suffix in (PART, NOTES)}
    for path in sorted(staging.rglob("*"), reverse=True):
        name = path.relative_to(staging).as_posix()
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # not empty, so something in it is kept
                path.rmdir()
        elif name in names:
            # Complete, but its folder was not; the notes still tell whether it is up to date.
            path.replace(path.with_name(path.name + PART))
        elif name not in parts:
            path.unlink()


def _land(staging: Path, names: Mapping[str, str], destination: Path, replace: bool) -> None:
    """Turn a folder of complete parts into the destination."""
    for name in names:
        (staging / (name + PART)).replace(staging / name)
    for name in names:
        (staging / (name + NOTES)).unlink(missing_ok=True)
    publish_directory(staging, destination, replace=replace)


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, Expected]


def _learn(path: Path, expected: dict[str, Expected]) -> None:
    """Expect what the manifest says; it must not contradict what was known."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        logger.warning("%s is not a list of files; nothing is checked against it", MANIFEST)
        return
    for name, told in manifest.files.items():
        if name not in expected:
            raise DownloadError(f"{MANIFEST} lists {name!r}, which the server does not offer")
        known = expected[name]
        if not known.agrees_with(told):
            raise DownloadError(f"{MANIFEST} and the server disagree: {name!r} is {told}, {known}")
        expected[name] = Expected(
            num_bytes=known.num_bytes if told.num_bytes is None else told.num_bytes,
            sha256=told.sha256 or known.sha256,
        )


def _report_sum(
    expected: Mapping[str, Expected],
    seen: dict[str, tuple[int, int | None]],
    report: Progress,
    name: str,
    done: int,
    total: int | None,
) -> None:
    """Turn one file's progress into that of all files."""
    seen[name] = (done, total)
    totals = [seen[n][1] if n in seen else row.num_bytes for n, row in expected.items()]
    known = [total for total in totals if total is not None]
    all_done = sum(done for done, _ in seen.values())
    report(all_done, sum(known) if len(known) == len(totals) else None)


async def _all_or_first_error(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    failed: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except ExceptionGroup as failures:
        failed = failures.exceptions[0]
    if failed is not None:
        raise failed


async def _on_disk(path: Path, call: Callable[..., None], *args: object) -> None:
    """Run a blocking call in a thread; a failure becomes a sentence, and parts are kept."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        # A thread cannot be stopped, and nobody may close the file under its hands.
        await asyncio.gather(work, return_exceptions=True)
        raise
    except OSError as error:
        reason = "the disk is full" if is_disk_full(error) else error.strerror or str(error)
        raise DownloadError(f"Cannot write {str(path)!r}: {reason}") from error


class _Transfer:
    """One file on its way from a URL into a part, however often the line breaks."""

    def __init__(self, fetch: Fetch, url: str, part: Part, report: Progress) -> None:
        self._fetch = fetch
        self._url = url
        self._part = part
        self._report = report
        self._was_resumed = False

    async def complete(self, finish: Callable[[], None], retries: int, sleep: Sleep) -> None:
        """Fetch until the part is complete and checked, then finish it; or give up."""
        try:
            await _on_disk(self._part.path, self._part.open)
            if not self._is_complete():
                await self._run(retries, sleep)
            await _on_disk(self._part.path, finish)
        finally:
            self._part.close()

    async def _run(self, retries: int, sleep: Sleep) -> None:
        failures, best = 0, self._part.num_bytes
        while True:
            try:
                await self._attempt()
                return
            except (TinkexError, OSError, EOFError) as error:
                if isinstance(error, TinkexError) and not error.retryable:
                    raise
                if self._part.num_bytes > best:
                    failures, best = 0, self._part.num_bytes
                failures += 1
                if failures > retries:
                    raise self._given_up(error) from error
                told = getattr(error, "retry_after_seconds", None) or 0.0
            await sleep(max(told, backoff(_WAITS, failures, random.random())))

    def _is_complete(self) -> bool:
        """True if what an earlier try left needs no question to the server."""
        part, expected = self._part, self._part.expected
        if expected.sha256 is None or expected.num_bytes != part.num_bytes:
            return False
        self._report(part.num_bytes, expected.num_bytes)
        return part.has_expected_digest

    async def _attempt(self) -> None:
        asked = self._part.resume_headers()
        headers = {"accept-encoding": "identity"} | asked
        async with self._fetch(self._url, headers) as response:
            has_body = await self._begin(response, is_resuming=bool(asked))
            self._report(self._part.num_bytes, self._part.total_bytes)
            if has_body:
                await self._receive(response)
        await self._check()

    async def _begin(self, response: ResponseStream, *, is_resuming: bool) -> bool:
        """Judge the answer and get the part ready; False if the part is complete already."""
        part, headers = self._part, response.headers
        if response.status == 200:
            self._check_announced(Notes.of(headers).num_bytes)
            self._was_resumed = False
            await self._restart(Notes.of(headers))
            return True
        if not is_resuming or response.status not in {206, 416}:
            raise self._refusal(response)
        self._was_resumed = True
        start, total = _content_range(headers.get("content-range", ""))
        if response.status == 416:
            fits = part.num_bytes == (part.total_bytes if total is None else total)
        else:
            fits = start == part.num_bytes and part.notes.fit(headers, total)
        if not fits:
            await self._restart(Notes())
            raise _Broken("the file on the server has changed")
        self._check_announced(total)
        return response.status == 206

    async def _restart(self, notes: Notes) -> None:
        await _on_disk(self._part.path, self._part.restart, notes)

    def _check_announced(self, total: int | None) -> None:
        name, expected = self._part.final.name, self._part.expected.num_bytes
        if None not in {total, expected} and total != expected:
            raise DownloadError(f"{name} has {total} bytes on the server, expected {expected}")

    def _refusal(self, response: ResponseStream) -> DownloadError:
        text = f"the server answered {response.status}"
        verdict = judge(response.status, should_retry=should_retry(response.headers))
        if verdict.is_retryable:
            broken = _Broken(text)
            broken.retry_after_seconds = retry_after(response.headers)
            return broken
        error = DownloadError(f"Cannot download {self._part.final.name}: {text}")
        error.status, error.verdict = response.status, verdict
        return error

    async def _receive(self, response: ResponseStream) -> None:
        buffer = bytearray()
        try:
            async for chunk in response.chunks():
                buffer += chunk
                if len(buffer) >= BLOCK_BYTES:
                    full, buffer = buffer, bytearray()
                    await self._append(full)
        finally:
            # Also when the line broke: what has arrived need not be sent again.
            if buffer:
                await self._append(buffer)

    async def _append(self, block: bytearray) -> None:
        part = self._part
        total = part.total_bytes
        if total is not None and part.num_bytes + len(block) > total:
            await self._restart(Notes())
            raise _Broken(f"more than the announced {total} bytes arrived")
        await _on_disk(part.path, part.append, block)
        self._report(part.num_bytes, total)

    async def _check(self) -> None:
        part = self._part
        if part.total_bytes is not None and part.num_bytes < part.total_bytes:
            raise _Broken("the line went dead")
        if part.has_expected_digest:
            return
        await self._restart(Notes())
        if self._was_resumed:
            # The pieces may be of different files; a fresh copy will tell.
            raise _Broken("the pieces do not fit together")
        raise DownloadError(f"{part.final.name} does not have the sha256 {part.expected.sha256}")

    def _given_up(self, error: Exception) -> DownloadError:
        part = self._part
        total = "?" if part.total_bytes is None else part.total_bytes
        reason = str(error) or type(error).__name__
        return DownloadError(
            f"Downloading {part.final.name} stopped at {part.num_bytes} of {total} bytes: {reason}"
        )


def _content_range(text: str) -> tuple[int | None, int | None]:
    """The start and the total of a Content-Range header, None where it does not say."""
    match = _CONTENT_RANGE.fullmatch(text.strip())
    start, total = match.groups() if match else (None, "*")
    return int(start) if start else None, None if total == "*" else int(total)
