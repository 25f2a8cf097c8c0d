"""The physical memory that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
#: Where a container's limit is, in either version of cgroups.
_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")


def machine_bytes(cgroup: Path = _CGROUP) -> int:
    """Physical memory in bytes, or the limit of the container if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _container_bytes(cgroup) or total)


def _container_bytes(cgroup: Path) -> int | None:
    for name in _LIMIT_FILES:
        try:
            limit = int((cgroup / name).read_text())
        except (OSError, ValueError):
            continue
        if limit > 0:
            return limit
    return None
