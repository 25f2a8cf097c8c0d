"""Which build of PyTorch `make` installs: the CPU build only on Linux without an NVIDIA GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = ROOT / "scripts" / "install-torch.sh"

CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"

#: A Python that only writes down what pip is asked to install.
PYTHON = """#!/bin/sh
case "$*" in
  "-c "*) exit ${TORCH_MISSING:-1} ;;
  *"pip config list") echo "$PIP_SETTINGS" ;;
  *" install "*) echo "$*" >> "$LOG"; case "$*" in *--index-url*) exit ${CPU_FAILS:-0} ;; esac ;;
esac
"""

Install = Callable[..., list[str]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Runs the script on a made-up machine; returns the installations that were tried."""

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*, system: str = "Linux", has_gpu: bool = False, **environment: str) -> list[str]:
        log = tmp_path / "log"
        write("python", PYTHON)
        write("uname", f"#!/bin/sh\necho {system}\n")
        write("nvidia-smi", f"#!/bin/sh\nexit {0 if has_gpu else 1}\n")
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(
            [SCRIPT, tmp_path / "python", "2.13.0"],
            env={"PATH": path, "LOG": str(log), **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines() if log.exists() else []

    return run


needs_no_gpu = pytest.mark.skipif(
    Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA GPU"
)


@needs_no_gpu
def test_linux_without_gpu_uses_the_cpu_build(install: Install) -> None:
    [tried] = install()
    assert CPU_INDEX in tried
    assert tried.endswith("torch==2.13.0")


@needs_no_gpu
def test_unreachable_index_is_not_an_error(install: Install) -> None:
    first, second = install(CPU_FAILS="1")
    assert CPU_INDEX in first
    assert "--index-url" not in second


@pytest.mark.parametrize(
    "machine",
    [
        {"has_gpu": True},
        {"system": "Darwin"},
        {"PIP_SETTINGS": "global.index-url='https://packages.example/simple'"},
        {"PIP_SETTINGS": ":env:.find-links='/wheels'"},
    ],
)
def test_other_machines_use_the_default_index(machine: dict[str, str], install: Install) -> None:
    [tried] = install(**machine)
    assert "--index-url" not in tried


def test_installed_build_is_kept(install: Install) -> None:
    assert install(TORCH_MISSING="0") == []
