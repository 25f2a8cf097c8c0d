"""Disk side of a download: safe file names, locks, atomic directories, archive extraction."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Self, cast
from uuid import uuid4

from tinkex.display import format_bytes
from tinkex.errors import DownloadError, InvalidInput
from tinkex.system.atomic import publish_directory
from tinkex.system.locks import lock_descriptor

#: Called with the number of bytes done and the total, or None if the total is unknown.
ProgressCallback = Callable[[int, int | None], None]

#: Default limit of the extracted size: the larger of this and this multiple of the archive size.
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 16 * 2**30, 200
#: Maximum number of members of an archive.
MAX_MEMBERS = 100_000
#: Maximum number of bytes between two files of an archive; a normal header is far smaller.
MAX_HEADER_BYTES = 8 * 2**20
BLOCK_BYTES = 2**20

_DRIVE_PREFIX = re.compile(r"[A-Za-z]:")
_UNTRUSTED_HINT = "Do not trust the source of this file."


def safe_relative_path(name: str) -> PurePosixPath:
    """Parse an untrusted file name; raises unless it stays inside its directory."""
    path = PurePosixPath(name)
    has_bad_character = any(letter in "\\\x7f" or letter < " " for letter in name)
    is_outside = not path.parts or path.is_absolute() or ".." in path.parts
    if is_outside or has_bad_character or _DRIVE_PREFIX.match(name):
        raise DownloadError(f"Refused the unsafe file name {name!r}", hint=_UNTRUSTED_HINT)
    return path


def check_free_space(directory: Path, num_bytes: int, name: str) -> None:
    """Raise if a size is larger than the free space of the directory's disk."""
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise DownloadError(
            f"{name} needs {format_bytes(num_bytes)} of disk space, but {format_bytes(free)} are "
            f"free in {str(directory)!r}",
            hint="Free space or download to another disk; if the size looks wrong, do not trust "
            "this server.",
        )


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Lock a file or directory for this download; raises if another download holds it."""
    if os.name != "posix":
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if not (lock_descriptor(descriptor) and _is_same_file(descriptor, path)):
            raise DownloadError(f"Another download is writing {str(path)!r}")
        yield
    finally:
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Return whether the path still names the open file; the previous holder may have moved it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def extract_archive(
    archive: Path,
    destination: Path,
    *,
    max_bytes: int | None = None,
    progress: ProgressCallback = lambda *_: None,
    on_files: Callable[[int], None] = lambda _: None,
) -> Path:
    """Extract a tar, tar.gz or tar.zst into a new directory; `progress` counts the bytes read."""
    if os.path.lexists(destination):
        raise InvalidInput(f"{str(destination)!r} exists already")
    staging = destination.with_name(f".{destination.name}.extract-{uuid4().hex[:8]}")
    try:
        total = archive.stat().st_size
        limit = (
            max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * total) if max_bytes is None else max_bytes
        )
        staging.mkdir(parents=True)
        with archive.open("rb") as raw:

            def report(num_files: int) -> None:
                progress(raw.tell(), total)
                on_files(num_files)

            _TarExtractor(staging, limit, report).run(raw)
        publish_directory(staging, destination)
    except tarfile.TarError as error:
        raise DownloadError(f"{archive.name} is damaged or not a tar archive: {error}") from error
    except OSError as error:
        raise DownloadError(f"Cannot unpack {archive.name}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return destination


class _BoundedReader:
    """A stream that raises beyond a limit, so that no header can exhaust memory."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._done_bytes = 0
        self._limit_bytes = MAX_HEADER_BYTES

    def allow(self, num_bytes: int) -> None:
        """Allow this many more bytes, plus a header."""
        self._limit_bytes = self._done_bytes + num_bytes + MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        """Read bytes, like a file object."""
        try:
            block = self._source.read(size)
        except Exception as error:  # each decompressor raises its own types, some imported late
            raise tarfile.ReadError(str(error) or type(error).__name__) from error
        self._done_bytes += len(block)
        if self._done_bytes > self._limit_bytes:
            raise tarfile.ReadError("too many bytes between two files")
        return block


class _StrictTarInfo(tarfile.TarInfo):
    """A header parser that raises for damage which tarfile takes for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # a block of zeros: the regular end
            raise tarfile.ReadError(f"{error} instead of a file header") from error


class _TarExtractor:
    """Extracts one archive into a new directory."""

    def __init__(self, root: Path, max_bytes: int, report: Callable[[int], None]) -> None:
        self._root = root.resolve()
        self._max_bytes = max_bytes
        self._report = report
        self._num_bytes = 0
        self._seen: set[PurePosixPath] = set()

    def run(self, raw: IO[bytes]) -> None:
        """Extract all members."""
        reader = _BoundedReader(_open_decompressed(raw))
        stream = cast(IO[bytes], reader)  # tarfile uses only read() in this mode
        with tarfile.open(None, "r|", stream, BLOCK_BYTES, tarinfo=_StrictTarInfo) as tar:
            for member in tar:
                reader.allow(member.size)
                self._extract(tar, member)
                reader.allow(0)
        while reader.read(BLOCK_BYTES):
            pass  # to the end, where gzip and zstd have their checksums
        self._report(len(self._seen))
        if not self._seen:
            raise DownloadError("The archive contains no files")

    def _extract(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        if member.isdir() and not PurePosixPath(member.name).parts:
            return  # "./", the root directory
        target = self._checked_target(member)
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.resolve().is_relative_to(self._root):
            raise DownloadError(f"Refused {member.name!r}: it is outside the directory")
        source = cast(IO[bytes], tar.extractfile(member))
        with target.open("xb") as file:
            while block := source.read(BLOCK_BYTES):
                file.write(block)
                self._report(len(self._seen))

    def _checked_target(self, member: tarfile.TarInfo) -> Path:
        path = safe_relative_path(member.name)
        is_file = member.type in {tarfile.REGTYPE, tarfile.AREGTYPE} and not member.issparse()
        if not (is_file or member.isdir()) or member.size < 0:
            reason = "it is neither a file nor a directory"
            raise DownloadError(f"Refused {member.name!r}: {reason}", hint=_UNTRUSTED_HINT)
        if path in self._seen:
            raise DownloadError(
                f"Refused {member.name!r}: the name occurs twice", hint=_UNTRUSTED_HINT
            )
        check_free_space(self._root, member.size, member.name)
        self._seen.add(path)
        self._num_bytes += member.size
        if self._num_bytes > self._max_bytes or len(self._seen) > MAX_MEMBERS:
            raise DownloadError(
                f"Refused an archive of more than {self._max_bytes} bytes or {MAX_MEMBERS} files",
                hint="Raise max_bytes if you trust the source of this file.",
            )
        return self._root / path


def _open_decompressed(raw: IO[bytes]) -> IO[bytes]:
    """Return a stream of the uncompressed tar."""
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if magic == b"\x28\xb5\x2f\xfd":
        import zstandard  # noqa: PLC0415 - most archives do not need it

        decompressor = zstandard.ZstdDecompressor()
        return cast(IO[bytes], decompressor.stream_reader(raw, read_across_frames=True))
    return raw
