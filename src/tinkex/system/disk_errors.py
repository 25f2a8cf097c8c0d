"""Detect a full disk in errors of any library, and raise it as one kind of OSError."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Error numbers of a full disk and an exceeded quota.
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
#: The system's message.
DISK_FULL_MESSAGE = os.strerror(errno.ENOSPC)
#: Messages of libraries without an errno: safetensors and other Rust code, SQLite, and the zip
#: writer of torch, which hides the reason.
_DISK_FULL_TEXTS = (
    *(os.strerror(code).lower() for code in sorted(DISK_FULL_ERRNOS)),
    *(f"(os error {code})" for code in sorted(DISK_FULL_ERRNOS)),
    "database or disk is full",
    "] . unexpected pos ",
    "iostream error",
)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports a full disk."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            if error.errno in DISK_FULL_ERRNOS:
                return True
        elif _has_disk_full_text(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_disk_full_text(error: BaseException) -> bool:
    text = str(error).lower()
    return any(part in text for part in _DISK_FULL_TEXTS)


@contextmanager
def convert_disk_full(path: Path) -> Iterator[None]:
    """Convert errors about a full disk to `OSError(ENOSPC)` for `path`; others pass unchanged."""
    try:
        yield
    except Exception as error:  # libraries report a full disk with many types
        if not is_disk_full(error):
            raise
        raise OSError(errno.ENOSPC, DISK_FULL_MESSAGE, str(path)) from error
