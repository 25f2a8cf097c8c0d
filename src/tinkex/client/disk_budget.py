"""Limits on the disk space that one download may use, whatever the server declares or sends."""

from __future__ import annotations

import shutil
from pathlib import Path

from tinkex.client.archive import check_free_space
from tinkex.client.partial_file import PartialFile
from tinkex.errors import DownloadError
from tinkex.units import format_bytes

#: Free space that a download of undeclared size leaves: this share of the disk, up to this much.
RESERVE_SHARE, MAX_RESERVE_BYTES = 0.01, 2**30


class DiskBudget:
    """The disk space that the files of one download may use together."""

    def __init__(self, max_unsized_bytes: int) -> None:
        self._max_unsized_bytes = max_unsized_bytes
        self._missing_bytes: dict[Path, int] = {}
        self._unsized_bytes: dict[Path, int] = {}

    def reserve(self, part: PartialFile) -> None:
        """Count the bytes that a file still needs; refuse a declared size the disk cannot hold."""
        self.release(part)
        if part.total_bytes is None:
            self._unsized_bytes[part.path] = part.num_bytes
            return
        self._unsized_bytes.pop(part.path, None)
        self._missing_bytes[part.path] = max(0, part.total_bytes - part.num_bytes)
        check_free_space(part.path.parent, sum(self._missing_bytes.values()), part.final.name)

    def admit(self, part: PartialFile, num_bytes: int) -> None:
        """Count a block that is about to be written; refuse it beyond the limits."""
        after = part.num_bytes + num_bytes
        if part.total_bytes is not None:
            self._missing_bytes[part.path] = max(0, part.total_bytes - after)
            return
        self._unsized_bytes[part.path] = after
        received = sum(self._unsized_bytes.values())
        if received > self._max_unsized_bytes:
            raise DownloadError(
                f"Stopped {part.final.name}: {received:,} bytes arrived without a declared size, "
                f"and at most {self._max_unsized_bytes:,} are accepted",
                hint="If you trust this server, raise max_unsized_download_bytes "
                "(TINKEX_MAX_UNSIZED_DOWNLOAD_BYTES) and download again.",
            )
        disk = shutil.disk_usage(part.path.parent)
        if disk.free - num_bytes < min(MAX_RESERVE_BYTES, RESERVE_SHARE * disk.total):
            raise DownloadError(
                f"Stopped {part.final.name}: {received:,} bytes arrived without a declared size, "
                f"and only {format_bytes(disk.free)} are free in {str(part.path.parent)!r}",
                hint="Free space or download to another disk, if you trust this server.",
            )

    def release(self, part: PartialFile) -> None:
        """Forget the missing bytes of a file that is complete or given up."""
        self._missing_bytes.pop(part.path, None)
