"""Check whether a process is alive, and identify it beyond its pid."""

from __future__ import annotations

import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid runs; zombies do not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _read_stat_field(pid, 0) != "Z"


def read_start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if that is unknown.

    With the pid it identifies a process, because pids are reused.
    """
    return _read_stat_field(pid, 19)


def _read_stat_field(pid: int, index: int) -> str:
    """Return a field of /proc/PID/stat after the command name; empty on other systems."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        return stat.rpartition(")")[2].split()[index]
    except (OSError, IndexError):
        return ""
