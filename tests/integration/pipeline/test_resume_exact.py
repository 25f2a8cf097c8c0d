"""Resumed runs are bit-identical to uninterrupted ones."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.pipeline.tiny_stage import (
    FaultSpec,
    TinyStage,
    outcome,
    read_metrics,
    run,
    run_in_subprocess,
    start,
)
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.pipeline.checkpoints.step_directory import is_valid_step, latest_step, list_steps

Outcome = tuple[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Outcome of an uninterrupted run."""
    out_dir = tmp_path_factory.mktemp("whole") / "out"
    assert run_in_subprocess(out_dir) == 0
    return outcome(out_dir)


def test_run_is_identical_in_another_process(tmp_path: Path, expected: Outcome) -> None:
    result = run(tmp_path)
    assert result.is_complete
    assert result.steps == 12  # Seven batches in updates of two are four, three times.
    assert outcome(tmp_path) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at_batch", [1, 2, 9, 20])
def test_signal_saves_and_sets_the_exit_code(
    tmp_path: Path, expected: Outcome, number: int, at_batch: int
) -> None:
    assert (
        run_in_subprocess(tmp_path, FaultSpec(signal_at_batch=(number, at_batch))) == 128 + number
    )
    # A signal during an update abandons it; at its last batch the update is finished first.
    newest = latest_step(tmp_path / "checkpoints")
    assert (newest is None) == (at_batch == 1)
    assert run_in_subprocess(tmp_path) == 0
    assert outcome(tmp_path) == expected


def test_repeated_signals_lead_to_the_same_result(tmp_path: Path, expected: Outcome) -> None:
    codes = [run_in_subprocess(tmp_path, FaultSpec(signal_at_batch=(signal.SIGTERM, 4)))]
    while codes[-1] == 143:
        codes.append(run_in_subprocess(tmp_path, FaultSpec(signal_at_batch=(signal.SIGTERM, 4))))
        assert len(codes) < 20
    assert codes[-1] == 0
    assert len(codes) > 4
    assert outcome(tmp_path) == expected


def test_failed_batch_saves_the_last_step_before_raising(tmp_path: Path, expected: Outcome) -> None:
    with pytest.raises(ValueError, match="a bad row"):
        run(tmp_path, stage=TinyStage(fail_at_batch=6), save_interval=100)
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_00000002"
    run(tmp_path)
    assert outcome(tmp_path) == expected


def test_kill_at_any_file_operation_leaves_a_resumable_run(
    tmp_path: Path, expected: Outcome
) -> None:
    codes = set()
    # Saves, prunes and replacements of the first steps, and some of the last.
    for nth in [*range(1, 60, 2), *range(60, 140, 9)]:
        out_dir = tmp_path / str(nth)
        codes.add(run_in_subprocess(out_dir, FaultSpec(kill_at_file_event=nth)))
        for _, path in list_steps(out_dir / "checkpoints"):
            assert is_valid_step(path)
        run(out_dir)
        assert outcome(out_dir) == expected
        assert not list((out_dir / "checkpoints").glob(".*")), "nothing half written stays"
        shutil.rmtree(out_dir)
    assert codes == {-signal.SIGKILL}, "every one of them died"


def test_kills_at_random_moments_do_not_change_the_result(tmp_path: Path) -> None:
    rng, cut = random.Random(11), tmp_path / "cut"
    for _ in range(5):
        # Beyond the last logged step, so that each run makes progress before it is killed.
        goal = last_logged_step(cut) + rng.randint(1, 3)
        # The run is long enough that it cannot end before it is killed.
        process = start(cut, FaultSpec(seconds_per_batch=0.03), epochs=40)
        deadline = time.monotonic() + 60
        while last_logged_step(cut) < goal and process.is_alive() and time.monotonic() < deadline:
            process.join(timeout=rng.uniform(0.001, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was hit in the middle"
        for _, path in list_steps(cut / "checkpoints"):
            assert is_valid_step(path)
    assert run_in_subprocess(cut, epochs=40) == 0
    assert run_in_subprocess(tmp_path / "whole", epochs=40) == 0
    assert outcome(cut) == outcome(tmp_path / "whole")


def last_logged_step(out_dir: Path) -> int:
    """Return the last logged update of a run that may be writing."""
    try:
        lines = (out_dir / "metrics.jsonl").read_text().splitlines()
        return max((int(json.loads(line)["step"]) for line in lines), default=0)
    except (OSError, ValueError):
        return 0


def test_full_disk_keeps_checkpoints_intact(tmp_path: Path, expected: Outcome) -> None:
    assert run_in_subprocess(tmp_path, FaultSpec(signal_at_batch=(signal.SIGTERM, 9))) == 143
    before = [path.name for _, path in list_steps(tmp_path / "checkpoints")]
    assert run_in_subprocess(tmp_path, FaultSpec(max_file_bytes=5000)) == 1
    error = (tmp_path / "error").read_text()
    assert "could not be saved" in error
    assert "File too large" in error
    assert [path.name for _, path in list_steps(tmp_path / "checkpoints")] == before
    assert not list((tmp_path / "checkpoints").glob(".*"))
    run(tmp_path)
    assert outcome(tmp_path) == expected


def test_too_small_disk_is_rejected_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = TinyStage()
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 5))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"has [0-9]+ B free"):
        run(tmp_path, stage=stage)
    assert stage.num_losses == 0


def test_truncated_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, expected: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, max_steps=6, **NO_END)
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    with (newest / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    result = run(tmp_path, resume=newest, **NO_END)
    assert "optimizer.pt" in caplog.text
    assert "has 100 bytes" in caplog.text
    assert result.steps == 12


#: Without a fixed end, the number of updates may change between runs.
NO_END: dict[str, Any] = {"schedule": "constant"}


def test_checkpoint_with_a_flipped_bit_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, max_steps=6, **NO_END)
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    content = bytearray((newest / "model.pth").read_bytes())
    content[-200] ^= 1
    (newest / "model.pth").write_bytes(content)
    assert run(tmp_path, **NO_END).is_complete
    assert "damaged" in caplog.text


def test_changed_settings_are_rejected_by_name(tmp_path: Path) -> None:
    run(tmp_path, max_steps=4)
    with pytest.raises(InvalidInput, match=r"plan\.learning_rate: 0\.01 -> 0\.02"):
        run(tmp_path, max_steps=4, learning_rate=0.02)
    with pytest.raises(InvalidInput, match=r"plan\.max_steps: 4 -> 8"):
        run(tmp_path, max_steps=8)
    with pytest.raises(InvalidInput, match=r'plan\.optimizer: "adamw" -> "muon"'):
        run(tmp_path, max_steps=4, optimizer="muon")
    with pytest.raises(InvalidInput, match=r"settings\.width: 16 -> 8"):
        run(tmp_path, max_steps=4, stage=TinyStage(width=8))


def test_changed_settings_can_be_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, max_steps=4)
    assert run(tmp_path, max_steps=6, allow_partial=True).steps == 6
    assert "plan.max_steps: 4 -> 6" in caplog.text


def test_new_run_rejects_steps_of_an_old_one(tmp_path: Path) -> None:
    run(tmp_path, max_steps=4)
    with pytest.raises(InvalidInput, match="earlier run"):
        run(tmp_path, resume=None, max_steps=4)


def test_missing_step_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not a step directory"):
        run(tmp_path, resume=tmp_path / "step_00000009")


def test_finished_run_does_not_train_again(tmp_path: Path, expected: Outcome) -> None:
    run(tmp_path)
    stage = TinyStage()
    result = run(tmp_path, stage=stage)
    assert stage.num_losses == 0
    assert result.is_complete
    assert result.steps == 12
    assert outcome(tmp_path)[0] == expected[0]


def test_older_checkpoint_format_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, max_steps=4, **NO_END)
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    for name in ("manifest.json", "rng.pt", "config.json"):
        (newest / name).unlink()
    assert run(tmp_path, **NO_END).steps == 12
    assert "no RNG state for rank 0" in caplog.text


def test_resumed_run_logs_each_metric_once(tmp_path: Path) -> None:
    run_in_subprocess(tmp_path, FaultSpec(signal_at_batch=(signal.SIGTERM, 9)))
    run(tmp_path)
    steps = [record["step"] for record in read_metrics(tmp_path) if "loss" in record]
    assert steps == list(range(1, 13))


def test_muon_resumes_exactly(tmp_path: Path) -> None:
    run(tmp_path / "whole", optimizer="muon")
    run_in_subprocess(
        tmp_path / "cut", FaultSpec(signal_at_batch=(signal.SIGINT, 10)), optimizer="muon"
    )
    run(tmp_path / "cut", optimizer="muon")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_compiled_model_is_saved_under_plain_names(tmp_path: Path, expected: Outcome) -> None:
    stage = TinyStage()
    # Named like a compiled model; compilation itself is not tested.
    stage.model = _Compiled(stage.model)
    run_in_subprocess(tmp_path, FaultSpec(signal_at_batch=(signal.SIGTERM, 9)))
    run(tmp_path, stage=stage)
    assert outcome(tmp_path) == expected


class _Compiled(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._orig_mod(tokens)
        return found
