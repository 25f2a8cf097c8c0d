"""The physical memory that this process may use."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
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


def choose_evictions(
    needed_bytes: int, budget_bytes: int, loaded_bytes: Mapping[str, int], busy: Collection[str]
) -> list[str]:
    """The models to let go of, so that `needed_bytes` more fit into the budget, if they can.

    `loaded` has the bytes of each, longest unused first. Busy ones stay, whatever it costs; no
    more are named than it takes, and a budget of 0 has no end.
    """
    excess = sum(loaded_bytes.values()) + needed_bytes - budget_bytes
    doomed: list[str] = []
    for name, num_bytes in loaded_bytes.items():
        if excess <= 0 or budget_bytes == 0:
            break
        if name not in busy:
            doomed.append(name)
            excess -= num_bytes
    return doomed


def can_fit(
    needed_bytes: int, budget_bytes: int, loaded_bytes: Mapping[str, int], busy: Collection[str]
) -> bool:
    """Whether `needed_bytes` more fit into the budget once all that are not busy are gone."""
    held = sum(num_bytes for name, num_bytes in loaded_bytes.items() if name in busy)
    return budget_bytes == 0 or held + needed_bytes <= budget_bytes
