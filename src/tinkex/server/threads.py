"""How many threads the worker computes with, and how they wait for each other."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
#: Beside two busy processes on two cores, 1,000 cost nothing, and 10,000 twice the time.
_SPIN_COUNT = "1000"


def worker_environment(threads: int, cores: int) -> dict[str, str]:
    """Variables for the process that computes; they count only if its user set no others.

    A thread that is done with its share of a matrix product waits for the others. If it spins, it
    takes the core of whom it waits for as soon as anything else runs on the machine: a step of
    small products took 60 times as long beside busy processes. Asleep, it costs a wake-up, which
    takes longer than a small product does. So it spins for some microseconds, and then sleeps.
    """
    return {
        "OMP_NUM_THREADS": str(threads or cores),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": _SPIN_COUNT,
    }


def count_cores(cgroup: Path = _CGROUP) -> int:
    """The cores that this process may use; a container's share counts, not its host's cores."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores(cgroup)))


def _cgroup_cores(cgroup: Path) -> int:
    """How many cores a container is given; very many if nothing is said."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((cgroup / name).read_text() for name in names).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):
            continue
        if quota > 0 and period > 0:
            return math.ceil(quota / period)
    return 1 << 30
