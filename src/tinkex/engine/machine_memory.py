"""The physical memory that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
#: Where a container's limit is, in either version of cgroups.
_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")


def machine_memory_bytes(cgroup_root: Path = _CGROUP_ROOT) -> int:
    """Physical memory in bytes, or the limit of the container if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _cgroup_limit_bytes(cgroup_root) or total)


def _cgroup_limit_bytes(cgroup_root: Path) -> int | None:
    for name in _LIMIT_FILES:
        try:
            limit = int((cgroup_root / name).read_text())
        except (OSError, ValueError):
            continue
        if limit > 0:
            return limit
    return None
