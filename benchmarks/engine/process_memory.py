"""Memory of this process, from /proc."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


def rss_bytes() -> int:
    """Resident memory."""
    return _status("VmRSS")


def peak_of(work: Callable[[], object]) -> int:
    """Peak resident memory of some work, above the memory before it."""
    settle()
    # Resets the peak; see proc(5).
    Path("/proc/self/clear_refs").write_text("5")
    before = rss_bytes()
    work()
    return _status("VmHWM") - before


def settle() -> None:
    """Return freed memory to the system, so that reuse of it is counted."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")
