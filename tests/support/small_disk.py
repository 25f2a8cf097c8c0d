"""A disk of a few megabytes that really fills up, for a program in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_on_small_disk(
    disk: Path, program: str, *, size: str = "4m", then: str = "true"
) -> subprocess.CompletedProcess[str]:
    """Run Python code with the disk's folder as its argument; `then` is a last shell command."""
    own = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*own, "true"], check=False).returncode:
        pytest.skip("this machine does not allow mounting a small disk")
    disk.mkdir(exist_ok=True)
    script = 'mount -t tmpfs -o "size=$1" none "$2" && "$3" -c "$4" "$2"; code=$?; '
    script += f"{then}; exit $code"
    words = ["sh", "-c", script, "sh", size, str(disk), sys.executable, program]
    return subprocess.run(
        [*own, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


def leave_free(disk: Path, num_bytes: int) -> None:
    """Fill a disk until so much is left."""
    other = disk / "other"
    other.unlink(missing_ok=True)
    found = os.statvfs(disk)
    other.write_bytes(bytes(max(0, found.f_bavail * found.f_frsize - num_bytes)))
