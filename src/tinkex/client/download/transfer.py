"""Transfer one file: requests with resume and retries until the file is complete."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from tinkex.client.download.archive import BLOCK_BYTES, ProgressCallback
from tinkex.client.download.partial_file import DiskBudget, PartialFile, ResumeInfo
from tinkex.client.retry import RetryPolicy, backoff, parse_retry_after, parse_should_retry
from tinkex.errors import DownloadError, FailureClass, TinkexError, classify_failure
from tinkex.system.disk_errors import is_disk_full

_BACKOFF_POLICY = RetryPolicy()
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-[0-9]+|\*)/([0-9]{1,18}|\*)")

Sleep = Callable[[float], Awaitable[object]]


class ResponseStream(Protocol):
    """A response whose body has not been read yet; header names are in lower case."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    def chunks(self) -> AsyncIterator[bytes | bytearray | memoryview]: ...


#: GETs a URL. Raises a retryable TinkexError, OSError or EOFError if the connection is lost.
Fetch = Callable[[str, Mapping[str, str]], AbstractAsyncContextManager[ResponseStream]]


class _TransferInterrupted(DownloadError):
    """A failed attempt that may be retried."""

    verdict = FailureClass(is_user_error=False, is_retryable=True)
    retry_after_seconds: float | None = None


async def run_disk_call(path: Path, call: Callable[..., None], *args: object) -> None:
    """Run a blocking call in a thread; an OSError becomes a DownloadError that names the path."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        # A thread cannot be cancelled, and the file must stay open until it ends.
        await asyncio.gather(work, return_exceptions=True)
        raise
    except OSError as error:
        reason = "the disk is full" if is_disk_full(error) else error.strerror or str(error)
        raise DownloadError(f"Cannot write {str(path)!r}: {reason}") from error


class FileTransfer:
    """Downloads one URL into a partial file and resumes after a lost connection."""

    def __init__(
        self,
        fetch: Fetch,
        url: str,
        part: PartialFile,
        report: ProgressCallback,
        budget: DiskBudget,
        *,
        max_bytes: int | None = None,
    ) -> None:
        self._fetch = fetch
        self._url = url
        self._part = part
        self._report = report
        self._budget = budget
        self._max_bytes = max_bytes
        self._was_resumed = False

    async def complete(self, finish: Callable[[], None], retries: int, sleep: Sleep) -> None:
        """Download and verify the file, then call `finish`; raises if retries run out."""
        try:
            await run_disk_call(self._part.path, self._part.open)
            if not self._is_complete():
                await self._run(retries, sleep)
            await run_disk_call(self._part.path, finish)
        finally:
            self._budget.release(self._part)
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
                    raise self._final_error(error) from error
                retry_after = getattr(error, "retry_after_seconds", None) or 0.0
            await sleep(max(retry_after, backoff(_BACKOFF_POLICY, failures, random.random())))

    def _is_complete(self) -> bool:
        """True if an earlier attempt completed the file, so that no request is needed."""
        part, expected = self._part, self._part.expected
        if expected.sha256 is None or expected.num_bytes != part.num_bytes:
            return False
        self._report(part.num_bytes, expected.num_bytes)
        return part.has_expected_digest

    async def _attempt(self) -> None:
        resume_headers = self._part.resume_headers()
        headers = {"accept-encoding": "identity"} | resume_headers
        async with self._fetch(self._url, headers) as response:
            has_body = await self._start_body(response, is_resuming=bool(resume_headers))
            self._check_max(max(self._part.num_bytes, self._part.total_bytes or 0))
            self._budget.reserve(self._part)
            self._report(self._part.num_bytes, self._part.total_bytes)
            if has_body:
                await self._receive(response)
        await self._check_complete()

    async def _start_body(self, response: ResponseStream, *, is_resuming: bool) -> bool:
        """Check the response and prepare the file; False if the file is already complete."""
        part, headers = self._part, response.headers
        if response.status == 200:
            self._check_declared_size(ResumeInfo.from_headers(headers).num_bytes)
            self._was_resumed = False
            await self._restart(ResumeInfo.from_headers(headers))
            return True
        if not is_resuming or response.status not in {206, 416}:
            raise self._status_error(response)
        self._was_resumed = True
        start, total = _content_range(headers.get("content-range", ""))
        if response.status == 416:
            is_same = part.num_bytes == (part.total_bytes if total is None else total)
        else:
            is_same = start == part.num_bytes and part.info.is_same_file(headers, total)
        if not is_same:
            await self._restart(ResumeInfo())
            raise _TransferInterrupted("the file on the server has changed")
        self._check_declared_size(total)
        return response.status == 206

    async def _restart(self, info: ResumeInfo) -> None:
        await run_disk_call(self._part.path, self._part.restart, info)

    def _check_declared_size(self, total: int | None) -> None:
        name, expected = self._part.final.name, self._part.expected.num_bytes
        if None not in {total, expected} and total != expected:
            raise DownloadError(f"{name} has {total} bytes on the server, expected {expected}")

    def _check_max(self, num_bytes: int) -> None:
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise DownloadError(
                f"{self._part.final.name} has at least {num_bytes:,} bytes; at most "
                f"{self._max_bytes:,} are accepted",
                hint="No checkpoint needs a larger file of this name: do not trust this server.",
            )

    def _status_error(self, response: ResponseStream) -> DownloadError:
        text = f"the server answered {response.status}"
        verdict = classify_failure(
            response.status, should_retry=parse_should_retry(response.headers)
        )
        if verdict.is_retryable:
            interrupted = _TransferInterrupted(text)
            interrupted.retry_after_seconds = parse_retry_after(response.headers)
            return interrupted
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
            # Also after a lost connection: received bytes need not be sent again.
            if buffer:
                await self._append(buffer)

    async def _append(self, block: bytearray) -> None:
        part = self._part
        total = part.total_bytes
        if total is not None and part.num_bytes + len(block) > total:
            await self._restart(ResumeInfo())
            raise _TransferInterrupted(f"the server sent more than the declared {total} bytes")
        try:
            self._check_max(part.num_bytes + len(block))
            self._budget.admit(part, len(block))
        except DownloadError:
            # Discard the bytes: an endless response must not fill the disk.
            await self._restart(ResumeInfo())
            raise
        await run_disk_call(part.path, part.append, block)
        self._report(part.num_bytes, total)

    async def _check_complete(self) -> None:
        part = self._part
        if part.total_bytes is not None and part.num_bytes < part.total_bytes:
            raise _TransferInterrupted("the connection was closed early")
        if part.has_expected_digest:
            return
        await self._restart(ResumeInfo())
        if self._was_resumed:
            # The file may have changed between attempts; download it again from the start.
            raise _TransferInterrupted("the resumed file has the wrong digest")
        raise DownloadError(f"{part.final.name} does not have the sha256 {part.expected.sha256}")

    def _final_error(self, error: Exception) -> DownloadError:
        part = self._part
        total = "?" if part.total_bytes is None else part.total_bytes
        reason = str(error) or type(error).__name__
        return DownloadError(
            f"Downloading {part.final.name} stopped at {part.num_bytes} of {total} bytes: {reason}"
        )


def _content_range(text: str) -> tuple[int | None, int | None]:
    """Parse start and total of a Content-Range header; None where missing."""
    match = _CONTENT_RANGE.fullmatch(text.strip())
    start, total = match.groups() if match else (None, "*")
    return int(start) if start else None, None if total == "*" else int(total)
