"""Memory that a process keeps for its next update instead of giving it back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

#: glibc's names for what mallopt sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = (1 << 31) - 1
#: The most that glibc takes; larger tensors still come and go with system calls.
_MAX_MMAP_THRESHOLD = 1 << 25


@cache
def retain_freed_memory() -> bool:
    """Let freed memory stay in this process, for an update needs again what the last one freed.

    The system hands out fresh memory page by page, which costs more than most of what is done in
    it. True if the C library does as it is told; once is enough.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD) and mallopt(_TRIM_THRESHOLD, _NEVER_TRIM)
    )
