"""The disk side of a download: safe names, locks, folders that appear atomically, archives."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Self, cast
from uuid import uuid4

from tinkex.errors import DownloadError, InvalidInput
from tinkex.units import format_bytes

if sys.platform != "win32":
    import fcntl

#: Called with the bytes done, and the bytes there are or None if nobody knows.
ProgressCallback = Callable[[int, int | None], None]

#: What an archive may unpack to without being asked: this, or this many times its own size.
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 16 * 2**30, 200
#: How many files and folders an archive may hold.
MAX_MEMBERS = 100_000
#: How much may stand between two files of an archive; a header is far smaller.
MAX_HEADER_BYTES = 8 * 2**20
BLOCK_BYTES = 2**20

_DRIVE_PREFIX = re.compile(r"[A-Za-z]:")
_UNTRUSTED_HINT = "Do not trust the place this came from."


def safe_relative_path(name: str) -> PurePosixPath:
    """The path a foreign name stands for; refused unless it stays inside its folder."""
    path = PurePosixPath(name)
    has_odd_letter = any(letter in "\\\x7f" or letter < " " for letter in name)
    is_outside = not path.parts or path.is_absolute() or ".." in path.parts
    if is_outside or has_odd_letter or _DRIVE_PREFIX.match(name):
        raise DownloadError(f"Refused the unsafe file name {name!r}", hint=_UNTRUSTED_HINT)
    return path


def check_free_space(directory: Path, num_bytes: int, name: str) -> None:
    """Refuse a size that is larger than the free space of the directory's disk."""
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise DownloadError(
            f"{name} needs {format_bytes(num_bytes)} of disk space, and {format_bytes(free)} are "
            f"free in {str(directory)!r}",
            hint="Free space or download to another disk; if the size looks wrong, do not trust "
            "this server.",
        )


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold a file or folder for this download alone; refuse if another one holds it."""
    if os.name != "posix":
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if not _try_lock(descriptor, path):
            raise DownloadError(f"Another download is writing {str(path)!r}")
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who held it before may have renamed it: then this is not what the path means now.
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def fsync_path(path: Path) -> None:
    """Push a file or folder to the disk, so that it outlives a power cut."""
    if os.name != "posix" and path.is_dir():
        return  # only POSIX lets a folder be opened
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def recover_directory(destination: Path) -> None:
    """Finish or undo a replacement that was interrupted half-way."""
    aside = _replaced_path(destination)
    if not aside.exists():
        return
    if destination.exists():
        shutil.rmtree(aside)
    else:
        aside.rename(destination)


def publish_directory(staging: Path, destination: Path, *, replace: bool = False) -> None:
    """Give a finished folder its final name; what it replaces is deleted last."""
    for path in [*staging.rglob("*"), staging]:
        fsync_path(path)
    aside = _replaced_path(destination)
    if replace and destination.exists():
        destination.rename(aside)
    try:
        staging.rename(destination)
    except OSError:
        recover_directory(destination)
        raise
    fsync_path(destination.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _replaced_path(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.replaced")


def extract_archive(
    archive: Path,
    destination: Path,
    *,
    max_bytes: int | None = None,
    progress: ProgressCallback = lambda *_: None,
    on_files: Callable[[int], None] = lambda _: None,
) -> Path:
    """Unpack a tar, or one in gzip or zstd, into a new folder; progress counts the bytes read."""
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
    """A stream that gives no more than its limit, so that no header can fill the memory."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._done_bytes = 0
        self._limit_bytes = MAX_HEADER_BYTES

    def allow(self, num_bytes: int) -> None:
        """Let this much more through, and a header."""
        self._limit_bytes = self._done_bytes + num_bytes + MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        """Read on, as file objects do."""
        try:
            block = self._source.read(size)
        except Exception as error:  # each packer has errors of its own, some loaded late
            raise tarfile.ReadError(str(error) or type(error).__name__) from error
        self._done_bytes += len(block)
        if self._done_bytes > self._limit_bytes:
            raise tarfile.ReadError("there is too much between two files")
        return block


class _StrictTarInfo(tarfile.TarInfo):
    """A header that refuses the damage which tarfile takes for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # a block of zeros: the end, as it should be
            raise tarfile.ReadError(f"{error} where a file should begin") from error


class _TarExtractor:
    """One archive on its way into a fresh folder."""

    def __init__(self, root: Path, max_bytes: int, report: Callable[[int], None]) -> None:
        self._root = root.resolve()
        self._max_bytes = max_bytes
        self._report = report
        self._num_bytes = 0
        self._seen: set[PurePosixPath] = set()

    def run(self, raw: IO[bytes]) -> None:
        """Unpack everything."""
        meter = _BoundedReader(_open_decompressed(raw))
        stream = cast(IO[bytes], meter)  # tarfile asks for nothing but read() in this mode
        with tarfile.open(None, "r|", stream, BLOCK_BYTES, tarinfo=_StrictTarInfo) as tar:
            for member in tar:
                meter.allow(member.size)
                self._unpack(tar, member)
                meter.allow(0)
        while meter.read(BLOCK_BYTES):
            pass  # on to the very end, where gzip and zstd keep their checksums
        self._report(len(self._seen))
        if not self._seen:
            raise DownloadError("The archive holds no files")

    def _unpack(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        if member.isdir() and not PurePosixPath(member.name).parts:
            return  # "./", the folder itself
        target = self._checked_target(member)
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.resolve().is_relative_to(self._root):
            raise DownloadError(f"Refused {member.name!r}: it leads out of its folder")
        source = cast(IO[bytes], tar.extractfile(member))
        with target.open("xb") as file:
            while block := source.read(BLOCK_BYTES):
                file.write(block)
                self._report(len(self._seen))

    def _checked_target(self, member: tarfile.TarInfo) -> Path:
        path = safe_relative_path(member.name)
        is_file = member.type in {tarfile.REGTYPE, tarfile.AREGTYPE} and not member.issparse()
        if not (is_file or member.isdir()) or member.size < 0:
            reason = "it is neither a file nor a folder"
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
                hint="Raise max_bytes if you trust the place this came from.",
            )
        return self._root / path


def _open_decompressed(raw: IO[bytes]) -> IO[bytes]:
    """The tar inside, whatever packs it."""
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if magic == b"\x28\xb5\x2f\xfd":
        import zstandard  # noqa: PLC0415 - most archives do not need it

        unpacker = zstandard.ZstdDecompressor()
        return cast(IO[bytes], unpacker.stream_reader(raw, read_across_frames=True))
    return raw
