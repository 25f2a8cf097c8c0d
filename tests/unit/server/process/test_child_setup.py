"""Threads of a worker: the setting, or the cores that its container may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinkex.server.process.child_setup import count_cores, worker_environment
from tinkex.settings import child_environment

CORES = len(os.sched_getaffinity(0))


def test_worker_threads_default_to_cores_without_spinning() -> None:
    assert worker_environment(0, 8) == {
        "OMP_NUM_THREADS": "8",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "1000",
    }
    assert worker_environment(3, 8)["OMP_NUM_THREADS"] == "3"


def test_user_variables_have_precedence() -> None:
    environment = child_environment(
        worker_environment(0, 8), {"OMP_NUM_THREADS": "5", "PATH": "/bin"}
    )
    assert environment == {**worker_environment(5, 8), "PATH": "/bin"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, CORES),
        ({"cpu.max": "max 100000\n"}, CORES),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, CORES),
        ({"cpu.max": ""}, CORES),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000\n"}, CORES),
    ],
)
def test_container_cpu_limit(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_cores(tmp_path) == cores
