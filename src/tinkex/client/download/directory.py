"""Downloads: streamed, resumed after a break, checked, and visible only when complete."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tinkex.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from tinkex.client.config import MAX_UNSIZED_DOWNLOAD_BYTES
from tinkex.client.download.archive import (
    MAX_MEMBERS,
    ProgressCallback,
    check_free_space,
    exclusive_lock,
    publish_directory,
    recover_directory,
    safe_relative_path,
)
from tinkex.client.download.partial_file import (
    INFO_SUFFIX,
    PART_SUFFIX,
    DiskBudget,
    FileDigest,
    PartialFile,
)
from tinkex.client.download.transfer import Fetch, FileTransfer, Sleep, run_disk_call
from tinkex.errors import DownloadError, InvalidInput
from tinkex.logs import get_logger

logger = get_logger(__name__)


async def download_file(  # noqa: PLR0913 - each of these is for the caller to decide
    fetch: Fetch,
    url: str,
    destination: Path,
    *,
    expected_bytes: int | None = None,
    expected_sha256: str | None = None,
    progress: ProgressCallback | None = None,
    retries: int = 5,
    sleep: Sleep = asyncio.sleep,
    max_unsized_bytes: int = MAX_UNSIZED_DOWNLOAD_BYTES,
) -> Path:
    """Fetch one file, resuming an earlier attempt; it gets its name when complete.

    `retries` counts consecutive failures without progress. `max_unsized_bytes` limits a file whose
    size is not declared by the response or the caller.
    """
    destination = Path(destination)
    if destination.is_dir():
        raise InvalidInput(f"{str(destination)!r} is a folder, not a place for a file")
    part = PartialFile(destination, FileDigest(num_bytes=expected_bytes, sha256=expected_sha256))
    budget = DiskBudget(max_unsized_bytes)
    transfer = FileTransfer(fetch, url, part, progress or (lambda *_: None), budget)
    await transfer.complete(part.publish, retries, sleep)
    return destination


async def download_directory(  # noqa: PLR0913 - each of these is for the caller to decide
    fetch: Fetch,
    files: Mapping[str, str],
    destination_dir: Path,
    *,
    sizes: Mapping[str, int] | None = None,
    digests: Mapping[str, str] | None = None,
    force: bool = False,
    concurrency: int = 4,
    progress: ProgressCallback | None = None,
    retries: int = 5,
    sleep: Sleep = asyncio.sleep,
    max_unsized_bytes: int = MAX_UNSIZED_DOWNLOAD_BYTES,
) -> Path:
    """Fetch files (path -> URL) into a new folder, which appears when all of them are there.

    After a failure the parts stay in `.<name>.partial`, and the next call resumes them.
    `max_unsized_bytes` limits the files of undeclared size, counted together.
    """
    if concurrency < 1:
        raise InvalidInput(f"concurrency must be at least 1, got {concurrency}")
    _check_names(files)
    destination = check_destination(Path(destination_dir), force=force)
    staging = staging_path(destination)
    sizes, digests = sizes or {}, digests or {}
    expected = {n: FileDigest(num_bytes=sizes.get(n), sha256=digests.get(n)) for n in files}
    report = partial(_report_total_progress, expected, {}, progress or (lambda *_: None))
    gate = asyncio.Semaphore(concurrency)
    budget = DiskBudget(max_unsized_bytes)

    async def fetch_one(name: str) -> None:
        part = PartialFile(staging / name, expected[name])
        max_bytes = MAX_MANIFEST_BYTES if name == MANIFEST_NAME else None
        transfer = FileTransfer(
            fetch, files[name], part, partial(report, name), budget, max_bytes=max_bytes
        )
        async with gate:
            await transfer.complete(part.sync, retries, sleep)

    await run_disk_call(staging, partial(staging.mkdir, parents=True, exist_ok=True))
    with exclusive_lock(staging):
        await run_disk_call(staging, _remove_stale_files, staging, files)
        if MANIFEST_NAME in files:
            await fetch_one(MANIFEST_NAME)
            _apply_manifest(staging / (MANIFEST_NAME + PART_SUFFIX), expected)
        _check_declared_sizes(staging, expected)
        await _run_all(fetch_one(name) for name in files if name != MANIFEST_NAME)
        await run_disk_call(destination, _publish_parts, staging, files, destination, force)
    return destination


def _check_names(files: Mapping[str, str]) -> None:
    if not files:
        raise InvalidInput(f"There is nothing to download in {files!r}")
    if len(files) > MAX_MEMBERS:
        raise DownloadError(f"The server lists {len(files):,} files, at most {MAX_MEMBERS:,}")
    paths = {name: safe_relative_path(name) for name in files}
    for name, path in paths.items():
        is_temporary = name.endswith((PART_SUFFIX, INFO_SUFFIX))
        is_below_file = any(str(up) in files for up in path.parents)
        if is_temporary or is_below_file or str(path) != name:
            raise DownloadError(f"Refused the file name {name!r}: it would clash with another")


def staging_path(destination: Path) -> Path:
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


def _remove_stale_files(staging: Path, names: Mapping[str, str]) -> None:
    """Of what an earlier call has left, keep the parts of these files and nothing else."""
    parts = {name + suffix for name in names for suffix in (PART_SUFFIX, INFO_SUFFIX)}
    for path in sorted(staging.rglob("*"), reverse=True):
        name = path.relative_to(staging).as_posix()
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # not empty, so something in it is kept
                path.rmdir()
        elif name in names:
            # Complete, but its folder was not; the notes still tell whether it is up to date.
            path.replace(path.with_name(path.name + PART_SUFFIX))
        elif name not in parts:
            path.unlink()


def _publish_parts(
    staging: Path, names: Mapping[str, str], destination: Path, replace: bool
) -> None:
    """Turn a folder of complete parts into the destination."""
    for name in names:
        (staging / (name + PART_SUFFIX)).replace(staging / name)
    for name in names:
        (staging / (name + INFO_SUFFIX)).unlink(missing_ok=True)
    publish_directory(staging, destination, replace=replace)


class _ManifestFiles(msgspec.Struct, frozen=True):
    files: dict[str, FileDigest]


def _apply_manifest(path: Path, expected: dict[str, FileDigest]) -> None:
    """Expect what the manifest says; it must not contradict what was known."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=_ManifestFiles)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        logger.warning("%s is not a list of files; nothing is checked against it", MANIFEST_NAME)
        return
    for name, told in manifest.files.items():
        if name not in expected:
            raise DownloadError(f"{MANIFEST_NAME} lists {name!r}, which the server does not offer")
        known = expected[name]
        if not known.is_consistent_with(told):
            raise DownloadError(
                f"{MANIFEST_NAME} and the server disagree: {name!r} is {told}, {known}"
            )
        expected[name] = FileDigest(
            num_bytes=known.num_bytes if told.num_bytes is None else told.num_bytes,
            sha256=told.sha256 or known.sha256,
        )


def _check_declared_sizes(staging: Path, expected: Mapping[str, FileDigest]) -> None:
    """Refuse declared sizes that are more than the disk can hold, before any file is fetched."""
    num_bytes = sum(row.num_bytes or 0 for row in expected.values())
    parts = (staging / (name + PART_SUFFIX) for name in expected)
    num_bytes -= sum(part.stat().st_size for part in parts if part.is_file())
    check_free_space(staging, num_bytes, "The download")


def _report_total_progress(
    expected: Mapping[str, FileDigest],
    seen: dict[str, tuple[int, int | None]],
    report: ProgressCallback,
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


async def _run_all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    failed: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for job in coroutines:
                group.create_task(job)
    except ExceptionGroup as failures:
        failed = failures.exceptions[0]
    if failed is not None:
        raise failed
