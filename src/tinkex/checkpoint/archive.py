"""Stream any byte range of a checkpoint as a tar, or of one of its files, in constant memory.

A plan lists segments with known sizes, so that a response can start anywhere. The same files give
the same bytes on every machine: sorted names, no times, no owners. Only files in the manifest are
read.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tinkex.checkpoint.manifest import (
    MANIFEST_NAME,
    downloadable_names,
    manifest_name,
    parse_manifest,
    read_manifest,
    read_manifest_bytes,
)
from tinkex.errors import CheckpointError

#: Bytes read from a file at once.
CHUNK_BYTES = 256 * 1024


class FileSegment(NamedTuple):
    """A whole file."""

    path: Path
    size: int


ArchiveSegment: TypeAlias = bytes | FileSegment


@dataclass(frozen=True, slots=True)
class ArchivePlan:
    """The segments of an archive and their total size."""

    segments: Sequence[ArchiveSegment]
    size: int
    etag: str
    """A strong entity tag, with its quotes: equal tags mean equal bytes."""

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` (exclusive) in chunks.

        Raises CheckpointError if a file is missing or its size has changed.
        """
        end = self.size if stop is None else stop
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"the range {start} to {end} is not within {self.size} bytes")
        return self._read(start, end)

    def _read(self, start: int, stop: int) -> Iterator[bytes]:
        offset = 0
        for segment in self.segments:
            size = _segment_size(segment)
            first, last = max(start - offset, 0), min(stop - offset, size)
            if first < last and isinstance(segment, bytes):
                yield segment[first:last]
            elif first < last and not isinstance(segment, bytes):
                yield from _read_file(segment, first, last)
            offset += size


def plan_archive(directory: Path) -> ArchivePlan:
    """Plan a tar of a directory: all files in its manifest, and the manifest.

    The server's manifest of encrypted files is excluded.
    """
    content = read_manifest_bytes(directory)
    manifest = parse_manifest(directory, content)
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    own_manifest = manifest_name(directory)
    if own_manifest == MANIFEST_NAME:
        sizes[MANIFEST_NAME] = len(content)
    segments: list[ArchiveSegment] = []
    for name in sorted(sizes):
        is_manifest = name == own_manifest
        body = content if is_manifest else FileSegment(directory / name, sizes[name])
        segments += [_tar_header(name, sizes[name]), body, bytes(-sizes[name] % tarfile.BLOCKSIZE)]
    segments.append(bytes(2 * tarfile.BLOCKSIZE))
    # The manifest has every name, size and digest, so its digest identifies the archive.
    return _make_plan(segments, f"tar-{hashlib.sha256(content).hexdigest()}")


def plan_file(path: Path) -> ArchivePlan:
    """Plan one file of a checkpoint; raises CheckpointError if the manifest does not list it."""
    directory = _manifest_directory(path)
    name = path.relative_to(directory).as_posix()
    if name == MANIFEST_NAME and name in downloadable_names(directory):
        content = read_manifest_bytes(directory)
        return _make_plan([content], hashlib.sha256(content).hexdigest())
    entry = read_manifest(directory).files.get(name)
    if entry is None:
        raise CheckpointError(f"{name!r} is not in the {MANIFEST_NAME} of {directory.name!r}")
    return _make_plan([FileSegment(path, entry.size)], entry.sha256)


def _make_plan(segments: Sequence[ArchiveSegment], tag: str) -> ArchivePlan:
    return ArchivePlan(segments, sum(map(_segment_size, segments)), f'"{tag}"')


def _segment_size(segment: ArchiveSegment) -> int:
    return len(segment) if isinstance(segment, bytes) else segment.size


def _tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info.tobuf(tarfile.PAX_FORMAT)


def _manifest_directory(path: Path) -> Path:
    """Return the nearest parent directory with a manifest."""
    if ".." not in path.parts:
        for directory in path.parents:
            if (directory / manifest_name(directory)).is_file():
                return directory
    raise CheckpointError(f"no parent directory of {path.name!r} has a {MANIFEST_NAME}")


def _read_file(segment: FileSegment, first: int, last: int) -> Iterator[bytes]:
    try:
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{segment.path.name!r} cannot be read: {reason}") from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        _check_size(segment, os.fstat(file.fileno()).st_size)
        file.seek(first)
        while first < last:
            chunk = file.read(min(CHUNK_BYTES, last - first))
            if not chunk:
                _check_size(segment, first)
            first += len(chunk)
            yield chunk


def _check_size(segment: FileSegment, size: int) -> None:
    if size != segment.size:
        raise CheckpointError(
            f"{segment.path.name!r} has {size} bytes, expected {segment.size}: it was changed"
        )
