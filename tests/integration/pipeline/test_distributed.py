"""Data-parallel training with two ranks: equivalence, checkpoints and resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.pipeline.ranks_script import run_ranks
from tests.integration.pipeline.tiny_stage import TinyStage, outcome, read_metrics, run
from tinkex.pipeline.checkpoints.step_directory import latest_step

ROOT = Path(__file__).parents[3]
SCRIPT = "tests.integration.pipeline.ranks_script"


def torchrun(out_dir: Path, num_ranks: int, **changes: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command += ["--nproc-per-node", str(num_ranks), sys.executable, "-m", SCRIPT]
    command += [str(out_dir), json.dumps(changes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)


def wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two ranks."""
    out_dir = tmp_path_factory.mktemp("two")
    assert run_ranks(out_dir, 2) == [0, 0]
    return out_dir


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that was stopped by a signal."""
    out_dir = tmp_path_factory.mktemp("stopped")
    assert run_ranks(out_dir, 2, stop_at_batch=4) == [143, 143]
    return out_dir


def test_two_ranks_save_one_checkpoint_with_both_rng_states(two_ranks: Path) -> None:
    newest = latest_step(two_ranks / "checkpoints")
    assert newest is not None
    rng = torch.load(newest / "rng.pt", weights_only=True)
    assert len(rng) == 2
    assert not torch.equal(rng[0]["torch"], rng[1]["torch"])
    assert json.loads((newest / "state.json").read_text())["world_size"] == 2


def test_two_ranks_resume_bit_identically(two_ranks: Path, stopped: Path, tmp_path: Path) -> None:
    out_dir = Path(shutil.copytree(stopped, tmp_path / "out"))
    before = [record["step"] for record in read_metrics(out_dir) if "loss" in record]
    whole = [record["step"] for record in read_metrics(two_ranks) if "loss" in record]
    assert 0 < len(before) < len(whole)
    assert run_ranks(out_dir, 2) == [0, 0]
    assert outcome(out_dir) == outcome(two_ranks)


def test_one_rank_resumes_a_checkpoint_of_two(stopped: Path, tmp_path: Path) -> None:
    out_dir = Path(shutil.copytree(stopped, tmp_path / "out"))
    before = newest_state(out_dir)
    result = run(out_dir)
    # No batch is lost or seen twice: the position counts the batches of all ranks.
    assert result.is_complete
    assert result.samples == 3 * 27
    assert result.steps > before["global_step"]
    assert newest_state(out_dir)["world_size"] == 1


def newest_state(out_dir: Path) -> dict[str, Any]:
    newest = latest_step(out_dir / "checkpoints")
    assert newest is not None
    state: dict[str, Any] = json.loads((newest / "state.json").read_text())
    return state


def test_two_ranks_match_one_rank_with_double_accumulation(tmp_path: Path) -> None:
    assert run_ranks(tmp_path / "two", 2, is_plain=True, accumulation_steps=1) == [0, 0]
    run(tmp_path / "one", stage=TinyStage(is_plain=True), accumulation_steps=2)
    one = [record["loss"] for record in read_metrics(tmp_path / "one") if "loss" in record]
    two = [record["loss"] for record in read_metrics(tmp_path / "two") if "loss" in record]
    assert two == pytest.approx(one, rel=1e-5)


def test_signal_to_torchrun_saves_before_exit(two_ranks: Path, tmp_path: Path) -> None:
    process = torchrun(tmp_path, 2, seconds_per_batch=0.2)
    deadline = time.monotonic() + 120
    while latest_step(tmp_path / "checkpoints") is None and time.monotonic() < deadline:
        assert process.poll() is None, "the run ended by itself"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert wait(process) != 0
    logged = [record["step"] for record in read_metrics(tmp_path) if "loss" in record]
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == f"step_{logged[-1]:08d}", "every logged update is saved"
    assert run_ranks(tmp_path, 2) == [0, 0]
    assert outcome(tmp_path) == outcome(two_ranks)
