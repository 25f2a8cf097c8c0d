"""The memory of the machine or container."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.engine.memory_limits import machine_memory_bytes


def test_container_limit_is_used(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1048576\n")
    assert machine_memory_bytes(tmp_path) == 1048576


def test_cgroup_v1_limit_is_used(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("4096\n")
    assert machine_memory_bytes(tmp_path) == 4096


@pytest.mark.parametrize("text", ["max\n", "", "0\n", str(1 << 62)])
def test_machine_memory_without_lower_limit(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.max").write_text(text)
    assert machine_memory_bytes(tmp_path) == machine_memory_bytes(tmp_path / "absent") > 1 << 26
