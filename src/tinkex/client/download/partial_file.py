"""A partially downloaded file with its resume information, and the disk budget of a download."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import msgspec

from tinkex.client.download.archive import BLOCK_BYTES, check_free_space, exclusive_lock
from tinkex.display import format_bytes
from tinkex.errors import DownloadError, InvalidInput
from tinkex.system.atomic import fsync_path

#: Suffixes of the incomplete file and of its resume information.
PART_SUFFIX, INFO_SUFFIX = ".part", ".part.json"
#: A size in bytes, with a bounded number of digits.
_SIZE_PATTERN = re.compile(r"[0-9]{1,18}")


class FileDigest(msgspec.Struct, frozen=True, kw_only=True):
    """Known size and digest of a file before its download; also an entry of a manifest."""

    num_bytes: int | None = msgspec.field(default=None, name="size")
    sha256: str | None = None

    def __post_init__(self) -> None:
        if self.num_bytes is not None and not 0 <= self.num_bytes < 2**63:
            raise InvalidInput(f"Invalid file size: {self.num_bytes} bytes")
        if self.sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", self.sha256):
            raise InvalidInput(f"sha256 must have 64 hexadecimal digits, got {self.sha256!r}")

    def is_consistent_with(self, other: FileDigest) -> bool:
        """True unless a size or digest is known to both and differs."""
        digests = [item.sha256 and item.sha256.lower() for item in (self, other)]
        return _is_compatible(self.num_bytes, other.num_bytes) and _is_compatible(*digests)


def _is_compatible(first: object, second: object) -> bool:
    return first is None or second is None or first == second


class ResumeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Headers of the response that the bytes came from; the URL may change between attempts."""

    etag: str | None = None
    last_modified: str | None = None
    num_bytes: int | None = None

    @property
    def validator(self) -> str | None:
        """The value for If-Range: a strong etag, else the date."""
        is_strong = self.etag is not None and not self.etag.startswith("W/")
        return self.etag if is_strong else self.last_modified

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> ResumeInfo:
        """Read the headers of a response with status 200."""
        if headers.get("content-encoding", "identity") != "identity":
            return cls()  # lengths and ranges would refer to the encoded bytes
        length = headers.get("content-length", "")
        return cls(
            etag=headers.get("etag"),
            last_modified=headers.get("last-modified"),
            num_bytes=int(length) if _SIZE_PATTERN.fullmatch(length) else None,
        )

    def is_same_file(self, headers: Mapping[str, str], total: int | None) -> bool:
        """True unless the headers of a response with status 206 describe another file."""
        return _is_compatible(total, self.num_bytes) and _is_compatible(
            headers.get("etag"), self.etag
        )


class PartialFile:
    """An incomplete file, `<name>.part`, with its resume information beside it."""

    def __init__(self, final: Path, expected: FileDigest) -> None:
        self.final = final
        self.expected = expected
        self.path = final.with_name(final.name + PART_SUFFIX)
        self.info_path = final.with_name(final.name + INFO_SUFFIX)
        self.info = ResumeInfo()
        self.num_bytes = 0
        self._is_open = self._is_complete = False
        self._hash = hashlib.sha256()
        self._exit_stack = ExitStack()
        self._file: IO[bytes]

    def open(self) -> None:
        """Open the file, with the bytes that an earlier attempt received."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        with ExitStack() as stack:
            stack.enter_context(exclusive_lock(self.path))
            self._file = stack.enter_context(self.path.open("r+b"))
            with suppress(OSError, UnicodeDecodeError, msgspec.MsgspecError):
                self.info = msgspec.json.decode(self.info_path.read_bytes(), type=ResumeInfo)
            while self.expected.sha256 and (block := self._file.read(BLOCK_BYTES)):
                self._hash.update(block)
            self.num_bytes = self._file.seek(0, os.SEEK_END)
            self._exit_stack, self._is_open = stack.pop_all(), True

    def append(self, block: bytes | bytearray) -> None:
        """Add bytes at the end."""
        self._file.write(block)
        self._file.flush()
        self.num_bytes += len(block)
        if self.expected.sha256:
            self._hash.update(block)

    def restart(self, info: ResumeInfo) -> None:
        """Discard the bytes and start again, with new resume information."""
        # In this order: resume information must never describe the bytes of another file.
        self._file.seek(0)
        self._file.truncate()
        self.num_bytes, self.info, self._hash = 0, info, hashlib.sha256()
        self.info_path.write_bytes(msgspec.json.encode(info))

    @property
    def has_expected_digest(self) -> bool:
        """True unless a digest was expected and the bytes have another."""
        expected = self.expected.sha256
        return expected is None or self._hash.hexdigest() == expected.lower()

    @property
    def total_bytes(self) -> int | None:
        """The size of the complete file; None if neither the server nor a manifest declares it."""
        declared = self.info.num_bytes
        return self.expected.num_bytes if declared is None else declared

    def resume_headers(self) -> dict[str, str]:
        """Return headers that request the remaining bytes, if a changed file would be detected."""
        validator = self.info.validator
        if not self.num_bytes or (validator is None and self.expected.sha256 is None):
            return {}
        headers = {"range": f"bytes={self.num_bytes}-"}
        return headers | ({"if-range": validator} if validator else {})

    def sync(self) -> None:
        """Flush the complete file to disk, still under its temporary name."""
        os.fsync(self._file.fileno())
        self._is_complete = True

    def publish(self) -> None:
        """Rename the complete file to its final name."""
        self.sync()
        self.path.replace(self.final)
        fsync_path(self.final.parent)
        self.info_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file if it was opened; an empty incomplete one is deleted."""
        if self._is_open and self.num_bytes == 0 and not self._is_complete:
            self.path.unlink(missing_ok=True)
            self.info_path.unlink(missing_ok=True)
        with suppress(OSError):  # unwritten bytes on a full disk; the failed write was reported
            self._exit_stack.close()


#: Free space that a download of undeclared size leaves: this share of the disk, up to this much.
RESERVE_SHARE, MAX_RESERVE_BYTES = 0.01, 2**30


class DiskBudget:
    """The disk space that the files of one download may use together."""

    def __init__(self, max_unsized_bytes: int) -> None:
        self._max_unsized_bytes = max_unsized_bytes
        self._missing_bytes: dict[Path, int] = {}
        self._unsized_bytes: dict[Path, int] = {}

    def reserve(self, part: PartialFile) -> None:
        """Reserve the missing bytes of a file; raises if they exceed the free disk space."""
        self.release(part)
        if part.total_bytes is None:
            self._unsized_bytes[part.path] = part.num_bytes
            return
        self._unsized_bytes.pop(part.path, None)
        self._missing_bytes[part.path] = max(0, part.total_bytes - part.num_bytes)
        check_free_space(part.path.parent, sum(self._missing_bytes.values()), part.final.name)

    def admit(self, part: PartialFile, num_bytes: int) -> None:
        """Count a block that is about to be written; raises beyond the limits."""
        after = part.num_bytes + num_bytes
        if part.total_bytes is not None:
            self._missing_bytes[part.path] = max(0, part.total_bytes - after)
            return
        self._unsized_bytes[part.path] = after
        received = sum(self._unsized_bytes.values())
        if received > self._max_unsized_bytes:
            raise DownloadError(
                f"Stopped {part.final.name}: {received:,} bytes arrived without a declared size, "
                f"but at most {self._max_unsized_bytes:,} are accepted",
                hint="If you trust this server, raise max_unsized_download_bytes "
                "(TINKEX_MAX_UNSIZED_DOWNLOAD_BYTES) and download again.",
            )
        disk = shutil.disk_usage(part.path.parent)
        if disk.free - num_bytes < min(MAX_RESERVE_BYTES, RESERVE_SHARE * disk.total):
            raise DownloadError(
                f"Stopped {part.final.name}: {received:,} bytes arrived without a declared size, "
                f"but only {format_bytes(disk.free)} are free in {str(part.path.parent)!r}",
                hint="Free space or download to another disk, if you trust this server.",
            )

    def release(self, part: PartialFile) -> None:
        """Release the missing bytes of a file that is complete or abandoned."""
        self._missing_bytes.pop(part.path, None)
