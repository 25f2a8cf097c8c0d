"""Signals during an evaluation and during a save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.pipeline.tiny_stage import TinyStage, outcome, run
from tinkex.pipeline.checkpoints.step_directory import latest_step

ROOT = Path(__file__).parents[3]


class SignalledEvaluation(TinyStage):
    """Receives a signal during a long evaluation."""

    at_evaluation = 0
    has_gone_on = False

    def evaluate(self) -> Mapping[str, float]:
        if self.num_evaluations + 1 == self.at_evaluation:
            os.kill(os.getpid(), signal.SIGTERM)
            self.has_gone_on = True
        return super().evaluate()


@pytest.mark.parametrize(("at_evaluation", "saved"), [(1, None), (2, 3), (3, 6), (5, 12)])
def test_interrupted_evaluation_is_repeated_on_resume(
    tmp_path: Path, at_evaluation: int, saved: int | None
) -> None:
    stage = SignalledEvaluation()
    stage.at_evaluation = at_evaluation
    result = run(tmp_path / "cut", stage=stage)
    assert result.exit_code == 143
    assert not stage.has_gone_on
    newest = latest_step(tmp_path / "cut" / "checkpoints")
    assert (newest and newest.name) == (saved and f"step_{saved:08d}")
    assert run(tmp_path / "cut").is_complete
    run(tmp_path / "whole")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
from tests.integration.pipeline.tiny_stage import TinyStage, run

class Stuck(TinyStage):
    "Writes its weights so slowly that a second Ctrl-C arrives."
    def loss(self, batch):
        if self.num_losses == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return super().loss(batch)
    def write_legacy(self, weights, directory):
        time.sleep(1.2)
        os.kill(os.getpid(), signal.SIGINT)

try:
    run(Path(sys.argv[1]), stage=Stuck(), save_interval=0, eval_interval=0)
except KeyboardInterrupt:
    sys.exit(77)
"""


def test_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, timeout=120)
    assert done.returncode == 77
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_00000003"
