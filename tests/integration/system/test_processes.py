"""Liveness checks of processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tinkex.system.processes import is_alive, read_start_time

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def test_living_and_ended_processes() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert is_alive(os.getpid())
    assert not is_alive(process.pid)


@on_linux
def test_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid)
    process.wait()


@on_linux
def test_start_time_identifies_a_process() -> None:
    assert read_start_time(os.getpid()).isdecimal()
    assert read_start_time(2**31 - 1) == ""
