"""The memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


def rss_bytes() -> int:
    """Memory in use."""
    return _status("VmRSS")


def peak_of(work: Callable[[], object]) -> int:
    """How many bytes more a piece of work takes at its peak than there were before."""
    settle()
    # Begins a new peak; see proc(5).
    Path("/proc/self/clear_refs").write_text("5")
    before = rss_bytes()
    work()
    return _status("VmHWM") - before


def settle() -> None:
    """Give freed memory back, so that it is not used again unseen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")
