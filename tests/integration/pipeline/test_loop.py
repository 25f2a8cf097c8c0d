"""The training loop: updates, saves, retention and metrics."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.pipeline.tiny_stage import (
    TinySource,
    TinyStage,
    digest,
    make_plan,
    read_metrics,
    run,
)
from tinkex.errors import InvalidInput
from tinkex.nn.adamw import NonFiniteGradient
from tinkex.pipeline.checkpoints.saver import TensorSnapshot
from tinkex.pipeline.checkpoints.step_directory import PIN_FILE, latest_step, list_steps
from tinkex.pipeline.checkpoints.step_files import read_step
from tinkex.pipeline.stage_interface import StageLoss
from tinkex.pipeline.train.loop import train
from tinkex.pipeline.train.metrics import ConsoleSink
from tinkex.pipeline.train_settings import OPTIONS


def steps_of(out_dir: Path) -> list[int]:
    return sorted(step for step, _ in list_steps(out_dir / "checkpoints"))


def test_accumulation_matches_a_single_large_batch(tmp_path: Path) -> None:
    # Batches of 4, 4, 4, ..., 3 rows: a mean of means would weigh the last rows more.
    one = TinyStage(is_plain=True, source=TinySource(batch_size=27))
    many = TinyStage(is_plain=True, source=TinySource(batch_size=4))
    settings: dict[str, Any] = {"epochs": 2, "schedule": "constant", "warmup_steps": 0}
    run(tmp_path / "one", stage=one, accumulation_steps=1, **settings)
    run(tmp_path / "many", stage=many, accumulation_steps=100, **settings)
    first = [record["loss"] for record in read_metrics(tmp_path / "one") if "loss" in record]
    second = [record["loss"] for record in read_metrics(tmp_path / "many") if "loss" in record]
    assert len(first) == 2
    assert second == pytest.approx(first, rel=1e-5)
    for left, right in zip(one.model.parameters(), many.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_last_partial_update_is_taken(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.samples == 3 * 27
    assert result.tokens == 3 * 27 * 9


def test_last_step_is_always_saved(tmp_path: Path) -> None:
    run(tmp_path / "a", max_steps=5, save_interval=4, eval_interval=0)
    assert steps_of(tmp_path / "a") == [4, 5]
    run(tmp_path / "b", save_interval=0, eval_interval=0)
    assert steps_of(tmp_path / "b") == [12]


def test_save_interval_seconds(tmp_path: Path) -> None:
    run(
        tmp_path,
        save_interval=0,
        eval_interval=0,
        save_interval_seconds=1e-9,
        keep_last_checkpoints=0,
    )
    assert steps_of(tmp_path) == list(range(1, 13))


def test_update_waits_for_a_slow_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "reference", save_interval=1, keep_last_checkpoints=0)
    copy_tree = TensorSnapshot.copy_tree

    def late(self: TensorSnapshot, tree: Any) -> Any:
        # Long enough for the next update if the loop did not wait.
        time.sleep(0.05)
        return copy_tree(self, tree)

    monkeypatch.setattr(TensorSnapshot, "copy_tree", late)
    run(tmp_path / "late", save_interval=1, keep_last_checkpoints=0)
    for step, path in list_steps(tmp_path / "reference" / "checkpoints"):
        late_path = tmp_path / "late" / "checkpoints" / path.name
        expected, found = read_step(path), read_step(late_path)
        assert found.state["global_step"] == step
        torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=0)
        torch.testing.assert_close(found.optimizer, expected.optimizer, rtol=0, atol=0)


def test_retention_keeps_newest_every_kth_best_and_pinned(tmp_path: Path) -> None:
    class Worsening(TinyStage):
        """Held-out figures are best at step 3."""

        def evaluate(self) -> Mapping[str, float]:
            self.num_calls = getattr(self, "num_calls", 0) + 1
            return {"loss": float(abs(self.num_calls - 2))}

        def loss(self, batch: Any) -> StageLoss:
            if self.num_losses == 9:
                (tmp_path / "checkpoints" / "step_00000004" / PIN_FILE).touch()
            return super().loss(batch)

    run(tmp_path, stage=Worsening(), save_interval=1, keep_last_checkpoints=2, keep_every=5)
    assert steps_of(tmp_path) == [3, 4, 5, 10, 11, 12]


def test_state_json_fields(tmp_path: Path) -> None:
    run(tmp_path, max_steps=5, device="cpu")
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    text = (newest / "state.json").read_text()
    state = json.loads(text)
    assert (state["epoch"], state["step_in_epoch"], state["global_step"]) == (1, 2, 5)
    assert set(state["args"]) == set(OPTIONS)
    assert (state["args"]["device"], state["args"]["out_dir"]) == ("cpu", str(tmp_path))
    assert text == json.dumps(state, indent=2, sort_keys=True) + "\n"
    assert set(torch.load(newest / "optimizer.pt", weights_only=True)) == {"optimizer", "scaler"}
    names = {path.name for path in newest.iterdir()}
    assert names == {
        *("model.pth", "optimizer.pt", "state.json", "rng.pt", "config.json", "manifest.json")
    }
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000005\n"


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2)
    weights = torch.load(tmp_path / "checkpoints/step_00000002/model.pth", weights_only=True)
    assert weights["embed.weight"].data_ptr() == weights["lm_head.weight"].data_ptr()


def test_legacy_weights_match_the_model_and_are_rewritten_if_missing(
    tmp_path: Path,
) -> None:
    stage = TinyStage()
    run(tmp_path, stage=stage)
    weights = torch.load(tmp_path / "tiny.pth", weights_only=True)
    assert torch.equal(weights["hidden.weight"], stage.model.state_dict()["hidden.weight"])
    (tmp_path / "tiny.pth").unlink()
    run(tmp_path)
    assert (tmp_path / "tiny.pth").exists()


def test_training_reports_metrics_before_and_after(tmp_path: Path) -> None:
    stage = TinyStage()
    result = run(tmp_path, stage=stage, epochs=20)
    assert result.after["loss"] < result.before["loss"] / 2
    assert stage.exported == tmp_path / "hf"
    assert result.checkpoint == tmp_path / "checkpoints" / f"step_{result.steps:08d}"


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    often, never = TinyStage(), TinyStage()
    run(tmp_path / "often", stage=often, eval_interval=1)
    run(tmp_path / "never", stage=never, eval_interval=0)
    assert digest(often.model) == digest(never.model)


def test_non_finite_gradient_stops_before_the_update(tmp_path: Path) -> None:
    class Exploding(TinyStage):
        def loss(self, batch: Any) -> StageLoss:
            found = super().loss(batch)
            factor = float("inf") if self.num_losses == 6 else 1.0
            return StageLoss(total=found.total * factor, weight=found.weight, metrics=found.metrics)

    with pytest.raises(NonFiniteGradient):
        run(tmp_path, stage=Exploding(), save_interval=0)
    newest = latest_step(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_00000002"
    weights = torch.load(newest / "model.pth", weights_only=True)
    assert all(bool(value.isfinite().all()) for value in weights.values())


def test_batch_without_targets_changes_nothing(tmp_path: Path) -> None:
    class Empty(TinyStage):
        def loss(self, batch: Any) -> StageLoss:
            return StageLoss(total=torch.zeros(()), weight=0.0)

    stage = Empty()
    before = digest(stage.model)
    assert run(tmp_path, stage=stage).is_complete
    assert digest(stage.model) == before


def test_empty_data_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no data"):
        run(tmp_path, stage=TinyStage(source=TinySource(num_rows=0)))


def test_training_runs_outside_the_main_thread(tmp_path: Path) -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path)))
    thread.start()
    thread.join(timeout=60)
    assert results[0].is_complete


def test_failing_legacy_weights_stop_the_run(tmp_path: Path) -> None:
    class Unwritable(TinyStage):
        def write_legacy(self, weights: Mapping[str, Tensor], directory: Path) -> None:
            raise PermissionError(13, "Permission denied", str(directory))

    with pytest.raises(PermissionError):
        run(tmp_path, stage=Unwritable())


def test_console_shows_loss_throughput_and_remaining_time(tmp_path: Path) -> None:
    stream = io.StringIO()
    train(TinyStage(), make_plan(tmp_path), sink=ConsoleSink("tiny", stream))
    lines = stream.getvalue().splitlines()
    assert any("12/12" in line and "loss" in line and "tokens/s" in line for line in lines)
    assert "0:00 left" in lines[-2]
    assert lines[-1].startswith("tiny step=12 eval_loss=")
