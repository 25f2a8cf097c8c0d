"""Ctrl-C and closed pipes, in a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.integration.cli.conftest import SeededServer
from tests.integration.conftest import TIMEOUT_SECONDS
from tinkex.testing import Fault

TINKEX = [sys.executable, "-m", "tinkex"]


def test_ctrl_c_exits_with_130_without_traceback(seeded: SeededServer) -> None:
    seeded.server.inject("list_training_runs", Fault(delay_seconds=60.0), times=None)
    process = subprocess.Popen(
        [*TINKEX, "run", "list", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    seeded.server.wait_for("list_training_runs", timeout=TIMEOUT_SECONDS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, out) == (130, "")
    assert '"type": "Interrupted"' in err
    assert "Traceback" not in err


def test_closed_pipe_prints_no_error(seeded: SeededServer) -> None:
    command = f"{' '.join(TINKEX)} run list --json | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stderr == ""
