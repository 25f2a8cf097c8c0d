"""A process that sends one heartbeat and then blocks; started by the child process tests."""

from __future__ import annotations

import os
import time

from tinkex.server.process.child_setup import read_child_setup


def main() -> None:
    """Block until the process is killed."""
    beating = read_child_setup().heartbeat
    assert beating is not None
    os.write(beating, b".")
    time.sleep(600)
