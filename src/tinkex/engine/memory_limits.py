"""Memory limits: the memory of this machine, and which models to evict to stay within a budget."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
#: The files with a container's limit, for cgroups v2 and v1.
_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")


def machine_memory_bytes(cgroup_root: Path = _CGROUP_ROOT) -> int:
    """Physical memory in bytes, or the container's limit if that is lower."""
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


def choose_evictions(
    needed_bytes: int, budget_bytes: int, loaded_bytes: Mapping[str, int], busy: Collection[str]
) -> list[str]:
    """The fewest models to evict so that `needed_bytes` more fit into the budget, if possible.

    `loaded_bytes` has the size of each, least recently used first. Busy models are never evicted.
    A budget of 0 means no limit.
    """
    excess = sum(loaded_bytes.values()) + needed_bytes - budget_bytes
    evicted: list[str] = []
    for name, num_bytes in loaded_bytes.items():
        if excess <= 0 or budget_bytes == 0:
            break
        if name not in busy:
            evicted.append(name)
            excess -= num_bytes
    return evicted


def can_fit(
    needed_bytes: int, budget_bytes: int, loaded_bytes: Mapping[str, int], busy: Collection[str]
) -> bool:
    """Whether `needed_bytes` more fit into the budget after evicting all that are not busy."""
    busy_bytes = sum(num_bytes for name, num_bytes in loaded_bytes.items() if name in busy)
    return budget_bytes == 0 or busy_bytes + needed_bytes <= budget_bytes
