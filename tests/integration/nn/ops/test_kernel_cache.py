"""Libraries are compiled once per machine; problems with the cache fall back to compiling."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tinkex.nn.ops import library as kernel_library
from tinkex.nn.ops.library import is_supported_cpu, load_kernels

#: Exits with 0 if the library in the directory sys.argv[1] loads and works.
LOAD = """
import sys
from pathlib import Path
from tinkex.nn.ops.library import load_library

library = load_library(Path(sys.argv[1]))
sys.exit(library is None or library.answer() != 42)
"""


@dataclass
class Machine:
    """Processes with their own cache directory and a compiler that logs its calls."""

    sources: Path
    cache: Path
    log: Path
    environment: dict[str, str]

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", LOAD, self.sources], env=self.environment)

    def load(self) -> int:
        """Load the library in a new process; returns how often it compiled."""
        before = self.num_compilations
        assert self.start().wait(60) == 0
        return self.num_compilations - before

    @property
    def num_compilations(self) -> int:
        return self.log.read_text().count("-shared") if self.log.exists() else 0

    @property
    def library(self) -> Path:
        [path] = self.cache.glob("*.so")
        return path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    compiler, log = shutil.which("cc"), tmp_path / "log"
    assert compiler is not None
    fake = tmp_path / "bin" / "cc"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {compiler} "$@"\n')
    fake.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{fake.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.c").write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    return Machine(sources, tmp_path / "cache" / "tinkex" / "kernels", log, environment)


def test_second_process_loads_the_cached_library(machine: Machine) -> None:
    assert machine.load() == 1
    assert machine.cache.stat().st_mode & 0o777 == 0o700
    assert machine.load() == 0


def test_concurrent_processes_leave_a_valid_cache(machine: Machine) -> None:
    processes = [machine.start() for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    machine.load()
    assert machine.load() == 0
    assert not list(machine.cache.glob(".partial-*"))


@pytest.mark.parametrize("damage", ["flipped byte", "truncated", "no digest"])
def test_damaged_library_is_compiled_again(machine: Machine, damage: str) -> None:
    machine.load()
    content = bytearray(machine.library.read_bytes())
    if damage == "flipped byte":
        content[len(content) // 2] ^= 1
        machine.library.write_bytes(content)
    elif damage == "truncated":
        machine.library.write_bytes(content[:100])
    else:
        machine.library.with_suffix(".sha256").unlink()
    assert machine.load() == 1
    assert machine.load() == 0


def test_library_that_cannot_be_loaded_is_compiled_again(machine: Machine) -> None:
    machine.load()
    machine.library.write_bytes(b"not a library")
    machine.library.with_suffix(".sha256").write_text(kernel_library._digest(b"not a library"))
    assert machine.load() == 1
    assert machine.load() == 0


def test_changed_header_is_another_library(machine: Machine) -> None:
    machine.load()
    (machine.sources / "answer.h").write_text("#define ANSWER (40 + 2)\n")
    assert machine.load() == 1
    assert len(list(machine.cache.glob("*.so"))) == 2


def test_another_compiler_version_is_another_library(machine: Machine) -> None:
    machine.load()
    fake = Path(machine.environment["PATH"].split(":")[0]) / "cc"
    lines = fake.read_text().splitlines()
    lines.insert(1, '[ "$1" = --version ] && echo newer')
    fake.write_text("\n".join(lines) + "\n")
    assert machine.load() == 1
    assert len(list(machine.cache.glob("*.so"))) == 2


def test_unusable_cache_directory_falls_back_to_compiling(machine: Machine) -> None:
    machine.cache.parent.parent.write_text("a file where the cache directory should be")
    assert machine.load() == 1
    assert machine.load() == 1


def test_failed_write_falls_back_to_compiling(machine: Machine) -> None:
    machine.load()
    path = machine.library
    path.unlink()
    path.mkdir()
    assert machine.load() == 1
    assert machine.load() == 1


def test_directory_that_others_can_write_is_refused(machine: Machine) -> None:
    machine.load()
    machine.cache.chmod(0o770)
    assert machine.load() == 1
    machine.cache.chmod(0o700)
    assert machine.load() == 0


def test_symbolic_link_is_refused(machine: Machine, tmp_path: Path) -> None:
    machine.load()
    machine.cache.rename(tmp_path / "elsewhere")
    machine.cache.symlink_to(tmp_path / "elsewhere")
    assert machine.load() == 1


def test_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_library._cache_directory() == tmp_path / "tinkex" / "kernels"
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert kernel_library._cache_directory() is None


def test_old_files_are_removed(machine: Machine) -> None:
    machine.cache.mkdir(mode=0o700, parents=True)
    for age in range(6):
        for suffix in (".so", ".sha256"):
            path = machine.cache / f"old{age}{suffix}"
            path.write_text("old")
            os.utime(path, (1000 - age, 1000 - age))
    abandoned = machine.cache / ".partial-abandoned"
    abandoned.write_text("half")
    os.utime(abandoned, (1000, 1000))
    machine.load()
    assert not abandoned.exists()
    left = sorted(path.stem for path in machine.cache.glob("*.so") if path.stem.startswith("old"))
    assert left == ["old0", "old1", "old2"]
    assert len(list(machine.cache.glob("*.sha256"))) == 4


@pytest.mark.parametrize("compiler", [None, "/bin/false"])
def test_no_working_compiler_means_no_kernels(
    compiler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_kernels.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: compiler)
    try:
        assert load_kernels() is None
    finally:
        load_kernels.cache_clear()


def test_variable_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels.cache_clear()
    monkeypatch.setenv("TINKEX_KERNELS", "off")
    try:
        assert load_kernels() is None
    finally:
        load_kernels.cache_clear()


@pytest.mark.parametrize(
    ("features", "is_supported"),
    [
        ("x86_64 fpu avx avx2 fma", True),
        ("x86_64 fpu avx", False),
        ("x86_64 my-machine", True),
        ("aarch64 fp asimd", True),
    ],
)
def test_x86_needs_avx2(features: str, is_supported: bool) -> None:
    assert is_supported_cpu(features) == is_supported
