"""Download files and directories: resumable, verified, visible only when complete."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from tinkex.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from tinkex.client.config import MAX_UNSIZED_DOWNLOAD_BYTES
from tinkex.client.download.archive import (
    MAX_MEMBERS,
    ProgressCallback,
    check_free_space,
    exclusive_lock,
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
from tinkex.system.atomic import publish_directory, recover_directory

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
    """Download one file, resuming an earlier attempt; it gets its final name when complete.

    `retries` limits consecutive failures without progress. `max_unsized_bytes` limits a file whose
    size is declared neither by the response nor by the caller.
    """
    destination = Path(destination)
    if destination.is_dir():
        raise InvalidInput(f"{str(destination)!r} is a directory, not a file")
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
    """Download files (path -> URL) into a new directory, which is created when all are complete.

    After a failure the partial files stay in `.<name>.partial`, and the next call resumes them.
    `max_unsized_bytes` limits the total size of files of undeclared size.
    """
    if concurrency < 1:
        raise InvalidInput(f"concurrency must be at least 1, got {concurrency}")
    _check_names(files)
    destination = check_destination(Path(destination_dir), force=force)
    staging = staging_path(destination)
    sizes, digests = sizes or {}, digests or {}
    expected = {n: FileDigest(num_bytes=sizes.get(n), sha256=digests.get(n)) for n in files}
    report = partial(_report_total_progress, expected, {}, progress or (lambda *_: None))
    semaphore = asyncio.Semaphore(concurrency)
    budget = DiskBudget(max_unsized_bytes)

    async def fetch_one(name: str) -> None:
        part = PartialFile(staging / name, expected[name])
        max_bytes = MAX_MANIFEST_BYTES if name == MANIFEST_NAME else None
        transfer = FileTransfer(
            fetch, files[name], part, partial(report, name), budget, max_bytes=max_bytes
        )
        async with semaphore:
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
        raise InvalidInput(f"No files to download: {files!r}")
    if len(files) > MAX_MEMBERS:
        raise DownloadError(
            f"The server lists {len(files):,} files; at most {MAX_MEMBERS:,} are accepted"
        )
    paths = {name: safe_relative_path(name) for name in files}
    for name, path in paths.items():
        is_temporary = name.endswith((PART_SUFFIX, INFO_SUFFIX))
        is_below_file = any(str(parent) in files for parent in path.parents)
        if is_temporary or is_below_file or str(path) != name:
            raise DownloadError(f"Refused the file name {name!r}: it conflicts with another file")


def staging_path(destination: Path) -> Path:
    """Return the path of an incomplete directory."""
    return destination.with_name(f".{destination.name}.partial")


def check_destination(destination: Path, *, force: bool) -> Path:
    """Check that a directory can be created here, after undoing an interrupted replacement."""
    if destination.name in {"", ".."}:
        destination = destination.resolve()
    recover_directory(destination)
    if not os.path.lexists(destination):
        return destination
    if not force:
        hint = "With force it is replaced once the download is complete."
        raise InvalidInput(f"{str(destination)!r} exists already", hint=hint)
    if destination.is_symlink() or not destination.is_dir() or not destination.name:
        raise InvalidInput(f"{str(destination)!r} is not a directory that can be replaced")
    return destination


def _remove_stale_files(staging: Path, names: Mapping[str, str]) -> None:
    """Delete everything from an earlier call except the partial files of these names."""
    parts = {name + suffix for name in names for suffix in (PART_SUFFIX, INFO_SUFFIX)}
    for path in sorted(staging.rglob("*"), reverse=True):
        name = path.relative_to(staging).as_posix()
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # not empty
                path.rmdir()
        elif name in names:
            # A complete file of an incomplete directory; its resume info is still valid.
            path.replace(path.with_name(path.name + PART_SUFFIX))
        elif name not in parts:
            path.unlink()


def _publish_parts(
    staging: Path, names: Mapping[str, str], destination: Path, replace: bool
) -> None:
    """Rename complete partial files and publish their directory."""
    for name in names:
        (staging / (name + PART_SUFFIX)).replace(staging / name)
    for name in names:
        (staging / (name + INFO_SUFFIX)).unlink(missing_ok=True)
    publish_directory(staging, destination, replace=replace)


class _ManifestFiles(msgspec.Struct, frozen=True):
    files: dict[str, FileDigest]


def _apply_manifest(path: Path, expected: dict[str, FileDigest]) -> None:
    """Add sizes and digests of the manifest; raises if they contradict known ones."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=_ManifestFiles)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        logger.warning("%s is not a valid manifest; files are not verified", MANIFEST_NAME)
        return
    for name, listed in manifest.files.items():
        if name not in expected:
            raise DownloadError(f"{MANIFEST_NAME} lists {name!r}, which the server does not offer")
        known = expected[name]
        if not known.is_consistent_with(listed):
            raise DownloadError(
                f"{MANIFEST_NAME} and the server disagree: {name!r} is {listed}, {known}"
            )
        expected[name] = FileDigest(
            num_bytes=known.num_bytes if listed.num_bytes is None else listed.num_bytes,
            sha256=listed.sha256 or known.sha256,
        )


def _check_declared_sizes(staging: Path, expected: Mapping[str, FileDigest]) -> None:
    """Raise if the declared sizes exceed the free disk space, before any file is downloaded."""
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
    """Report the progress of all files after a change of one."""
    seen[name] = (done, total)
    totals = [seen[n][1] if n in seen else row.num_bytes for n, row in expected.items()]
    known = [total for total in totals if total is not None]
    all_done = sum(done for done, _ in seen.values())
    report(all_done, sum(known) if len(known) == len(totals) else None)


async def _run_all(coroutines: Iterable[Coroutine[object, None, None]]) -> None:
    first_error: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as errors:
        first_error = errors.exceptions[0]
    if first_error is not None:
        raise first_error
