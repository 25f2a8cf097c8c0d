"""Faults: damaged steps, concurrent trainers, full disks, non-finite losses, failing ranks."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.pipeline.ranks_script import run_ranks
from tests.integration.pipeline.tiny_stage import (
    TinyStage,
    make_plan,
    outcome,
    read_metrics,
    run,
    run_in_subprocess,
)
from tests.support.small_disk import run_on_small_disk
from tinkex.checkpoint.retention import StepRetention
from tinkex.nn.adamw import NonFiniteGradient
from tinkex.pipeline.checkpoints import step_directory
from tinkex.pipeline.checkpoints.step_directory import (
    REPLACED_PREFIX,
    is_valid_step,
    latest_step,
    list_steps,
    prune_steps,
)
from tinkex.pipeline.checkpoints.step_files import StepContent, write_step
from tinkex.pipeline.output_locks import LOCK_FILE, lock_directory
from tinkex.pipeline.stage_interface import StageLoss
from tinkex.pipeline.train.loop import train
from tinkex.pipeline.train.metrics import JsonlSink, MultiSink, make_sink

NO_END: dict[str, Any] = {"schedule": "constant"}


def names_of(out_dir: Path) -> list[str]:
    return [path.name for _, path in list_steps(out_dir / "checkpoints")]


# --- what stays ---------------------------------------------------------------------------------


def test_damaged_step_never_displaces_a_valid_one(tmp_path: Path) -> None:
    run(tmp_path, max_steps=6, keep_last_checkpoints=0, **NO_END)
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    content = bytearray((newest / "model.pth").read_bytes())
    content[-200] ^= 1
    (newest / "model.pth").write_bytes(content)

    class Failing(TinyStage):
        """Gives up after one update, of which the next run should know."""

        def loss(self, batch: Any) -> StageLoss:
            assert self.num_losses < 2, "given up"
            return super().loss(batch)

    with pytest.raises(AssertionError, match="given up"):
        run(tmp_path, stage=Failing(), keep_last_checkpoints=1, **NO_END)
    # If the damaged step counted, it would be the only one left.
    assert "step_00000005" in names_of(tmp_path)
    result = run(tmp_path, keep_last_checkpoints=1, **NO_END)
    assert result.steps == 12
    assert names_of(tmp_path)[0] == "step_00000012"


def test_rewound_run_archives_later_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes: dict[str, Any] = {"keep_last_checkpoints": 0, "eval_interval": 0, **NO_END}
    run(tmp_path, max_steps=8, **changes)
    back = tmp_path / "checkpoints" / "step_00000004"
    old = (tmp_path / "checkpoints" / "step_00000006" / "state.json").read_bytes()
    run(tmp_path, resume=str(back), max_steps=6, **changes)
    assert names_of(tmp_path) == ["step_00000006", "step_00000004", "step_00000002"]
    aside = tmp_path / "checkpoints" / "abandoned_1"
    assert f"2 later checkpoints were moved to {aside}" in caplog.text
    assert sorted(path.name for path in aside.iterdir()) == ["step_00000006", "step_00000008"]
    assert all(is_valid_step(path) for path in aside.iterdir())
    assert (aside / "step_00000006" / "state.json").read_bytes() == old
    # The newest step is now that of this branch; the archived one can still be resumed.
    assert run(tmp_path, max_steps=7, **changes).steps == 7
    run(tmp_path, resume=aside / "step_00000006", max_steps=7, **changes)
    assert names_of(tmp_path) == ["step_00000007"]
    left = sorted(path.name for path in aside.with_name("abandoned_2").iterdir())
    assert left == [f"step_{step:08d}" for step in (2, 4, 6, 7)]


def test_rewind_to_a_damaged_step_archives_steps_after_its_replacement(
    tmp_path: Path,
) -> None:
    run(tmp_path, max_steps=8, keep_last_checkpoints=0, eval_interval=0, **NO_END)
    back = tmp_path / "checkpoints" / "step_00000006"
    (back / "model.pth").write_bytes(b"cut")
    run(tmp_path, resume=back, max_steps=5, keep_last_checkpoints=0, eval_interval=0, **NO_END)
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_00000005"


def test_rewind_without_a_save_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path, max_steps=8, keep_last_checkpoints=0, **NO_END)
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    back = tmp_path / "checkpoints" / "step_00000004"
    with pytest.raises(ValueError, match="a bad row"):
        run(tmp_path, resume=back, stage=TinyStage(fail_at_batch=1), max_steps=8, **NO_END)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before


def test_resume_from_the_newest_step_archives_nothing(tmp_path: Path) -> None:
    run(tmp_path, max_steps=4, **NO_END)
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    (tmp_path / "checkpoints" / "step_00000009").mkdir()
    run(tmp_path, resume=newest, max_steps=6, **NO_END)
    assert not list((tmp_path / "checkpoints").glob("abandoned_*"))


def test_readers_rename_nothing(tmp_path: Path) -> None:
    run(tmp_path, max_steps=4, keep_last_checkpoints=0)
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    aside = newest.with_name(f"{REPLACED_PREFIX}{newest.name}")
    newest.rename(aside)
    # Simulate a writer between two renames.
    older = latest_step(tmp_path / "checkpoints")
    assert older is not None
    assert older.name == "step_00000003"
    assert aside.is_dir()
    assert run(tmp_path, max_steps=4).steps == 4
    assert newest.is_dir()


def test_latest_step_is_found_after_concurrent_pruning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = StepContent(
        weights={"w": torch.zeros(8)},
        optimizer={"optimizer": {}, "scaler": {}},
        state={"epoch": 0, "step_in_epoch": 0, "global_step": 0},
    )
    old = write_step(tmp_path, 1, content)
    check = step_directory.find_step_problem

    def prune_first(path: Path, *, verify_digests: bool = False) -> str | None:
        if old.is_dir():
            write_step(tmp_path, 2, content)
            shutil.rmtree(old)
        return check(path, verify_digests=verify_digests)

    monkeypatch.setattr(step_directory, "find_step_problem", prune_first)
    found = latest_step(tmp_path)
    assert found is not None
    assert found.name == "step_00000002"


def test_readers_tolerate_a_pruning_writer(tmp_path: Path) -> None:
    is_over = threading.Event()
    failures: list[str] = []

    def look() -> None:
        while not is_over.is_set():
            for _, path in list_steps(tmp_path):
                is_valid_step(path)
            found = latest_step(tmp_path)
            if found is None and is_begun.is_set():
                failures.append("no step was found")

    is_begun = threading.Event()
    readers = [threading.Thread(target=_noting(look, failures)) for _ in range(2)]
    for reader in readers:
        reader.start()
    content = StepContent(
        weights={"w": torch.zeros(8)},
        optimizer={"optimizer": {}, "scaler": {}},
        state={"epoch": 0, "step_in_epoch": 0, "global_step": 0},
    )
    try:
        for step in range(1, 60):
            write_step(tmp_path, step, content)
            prune_steps(tmp_path, StepRetention(keep_last=2), newest=step)
            if step > 3:
                is_begun.set()
    finally:
        is_over.set()
        for reader in readers:
            reader.join(timeout=30)
    assert failures == []


def _noting(work: Any, failures: list[str]) -> Any:
    def wrapped() -> None:
        try:
            work()
        except OSError as error:
            failures.append(repr(error))

    return wrapped


# --- one at a time ------------------------------------------------------------------------------


def test_second_trainer_is_rejected(tmp_path: Path) -> None:
    class Nosy(TinyStage):
        """Another trainer is started while this one trains."""

        error = ""

        def loss(self, batch: Any) -> StageLoss:
            if self.num_losses == 6:
                (tmp_path / "b").mkdir()
                assert (
                    run_in_subprocess(tmp_path / "b", ckpt_dir=tmp_path / "a" / "checkpoints") == 1
                )
                Nosy.error = (tmp_path / "b" / "error").read_text()
            return super().loss(batch)

    assert run(tmp_path / "a", stage=Nosy()).is_complete
    assert f"in use by another trainer (process {os.getpid()})" in Nosy.error
    run(tmp_path / "c")
    assert outcome(tmp_path / "a") == outcome(tmp_path / "c")
    # The lock is free, whatever the file contains.
    with lock_directory(tmp_path / "a" / "checkpoints"):
        pass
    assert (tmp_path / "a" / "checkpoints" / LOCK_FILE).read_text() == ""


# --- no number ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_loss_stops_at_the_last_valid_step(tmp_path: Path, value: float) -> None:
    class Odd(TinyStage):
        """Has a non-finite loss once, with a finite gradient."""

        def loss(self, batch: Any) -> StageLoss:
            found = super().loss(batch)
            odd = found.total.detach() * value if self.num_losses == 6 else 0.0
            return StageLoss(total=found.total + odd, weight=found.weight, metrics=found.metrics)

    with pytest.raises(NonFiniteGradient, match=r"update 3 is (nan|inf).* stops at step 2") as odd:
        run(tmp_path / "cut", stage=Odd(), save_interval=0)
    assert "--learning_rate" in str(odd.value.hint)
    assert names_of(tmp_path / "cut") == ["step_00000002"]
    # Without the bad batch it resumes normally.
    run(tmp_path / "cut")
    run(tmp_path / "whole")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


# --- the end ------------------------------------------------------------------------------------


def test_finished_run_evaluates_once(tmp_path: Path) -> None:
    first = run(tmp_path, eval_interval=0)
    before = read_metrics(tmp_path)

    class Blind(TinyStage):
        """Must not be evaluated."""

        def evaluate(self) -> Mapping[str, float]:
            raise AssertionError("held-out data was looked at again")

    again = run(tmp_path, stage=Blind(), eval_interval=0)
    assert again.after == first.after
    assert again.before == first.before
    assert read_metrics(tmp_path) == before


def test_failing_sink_does_not_lose_the_last_save(tmp_path: Path) -> None:
    class Broken(JsonlSink):
        """Cannot be closed."""

        def close(self) -> None:
            super().close()
            raise OSError(28, "No space left on device")

    sink = MultiSink([Broken(tmp_path / "a.jsonl"), JsonlSink(tmp_path / "metrics.jsonl")])
    with pytest.raises(OSError, match="No space left"):
        train(TinyStage(), make_plan(tmp_path), sink=sink)
    assert names_of(tmp_path)[0] == "step_00000012"
    assert (tmp_path / "hf" / "digest").is_file()
    with lock_directory(tmp_path / "checkpoints"):
        pass


def test_closed_console_does_not_stop_training_or_lose_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClosedPipe(io.StringIO):
        """A closed pipe."""

        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", ClosedPipe())
    plan = make_plan(tmp_path)
    assert train(TinyStage(), plan, sink=make_sink("tiny", plan)).is_complete
    steps = [record["step"] for record in read_metrics(tmp_path) if "loss" in record]
    assert steps == list(range(1, 13))


# --- ranks --------------------------------------------------------------------------------------


def test_failing_rank_stops_all_ranks_after_a_save(tmp_path: Path) -> None:
    codes = run_ranks(tmp_path / "cut", 2, fail_at=(1, 5), save_interval=0, eval_interval=0)
    assert codes == [1, 1]
    assert "another rank failed" in (tmp_path / "cut" / "error-0").read_text()
    assert "a bad row" in (tmp_path / "cut" / "error-1").read_text()
    assert names_of(tmp_path / "cut") == ["step_00000002"]
    newest = latest_step(tmp_path / "cut" / "checkpoints")
    assert newest is not None
    assert len(torch.load(newest / "rng.pt", weights_only=True)) == 2
    again = {"save_interval": 0, "eval_interval": 0}
    assert run_ranks(tmp_path / "cut", 2, **again) == [0, 0]
    assert run_ranks(tmp_path / "whole", 2, **again) == [0, 0]
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_failing_evaluation_stops_all_ranks_after_a_save(tmp_path: Path) -> None:
    changes = {"save_interval": 0, "eval_interval": 3}
    assert run_ranks(tmp_path, 2, fail_at_evaluation=2, **changes) == [1, 1]
    assert "no held-out rows" in (tmp_path / "error-0").read_text()
    assert "another rank failed" in (tmp_path / "error-1").read_text()
    assert names_of(tmp_path) == ["step_00000003"]


def test_error_on_rank_zero_stops_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, resume=str(tmp_path / "step_00000009")) == [1, 1]
    assert "not a step directory" in (tmp_path / "error-0").read_text()
    assert "another rank failed" in (tmp_path / "error-1").read_text()


def test_changed_world_size_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run_ranks(tmp_path, 2, stop_at_batch=4) == [143, 143]
    run(tmp_path)
    assert "saved with 4 batches per update over all ranks, now there are 2" in caplog.text


# --- a full disk --------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from tests.integration.pipeline.tiny_stage import TinyStage, run
from tinkex.errors import TinkexError

class Filling(TinyStage):
    "Another file fills the disk during training."
    def loss(self, batch):
        if self.num_losses == 9:
            with open(Path(sys.argv[1]) / "other", "wb") as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
        return super().loss(batch)

try:
    run(Path(sys.argv[1]) / "out", stage=Filling(width=64))
except (TinkexError, OSError) as error:
    sys.exit(f"stopped: {error}")
"""


def test_full_disk_stops_the_run_with_intact_checkpoints(tmp_path: Path) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    then = f'rm -f "$2/other"; cp -r "$2/out" "{copy}"'
    done = run_on_small_disk(disk, PROGRAM, then=then)
    assert done.returncode == 1, done.stderr
    assert "stopped: " in done.stderr
    assert "No space left" in done.stderr or "MB free" in done.stderr
    steps = list(list_steps(copy / "checkpoints"))
    assert steps
    assert all(is_valid_step(path) for _, path in steps)
    assert not list((copy / "checkpoints").glob(".partial-*"))
    json.loads((steps[0][1] / "state.json").read_text())
    # With enough space it completes normally.
    run(copy, stage=TinyStage(width=64))
    run(tmp_path / "whole", stage=TinyStage(width=64))
    assert outcome(copy) == outcome(tmp_path / "whole")
