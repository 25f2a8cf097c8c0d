"""`tinkex` as a process: it runs as a module, and a closed pipe is not an error."""

from __future__ import annotations

import subprocess
import sys


def test_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m tinkex --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinkex", "version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tinkex ")
