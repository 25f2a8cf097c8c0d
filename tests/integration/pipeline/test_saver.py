"""Background saving: snapshots, atomic writes and errors."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tinkex
from tests.integration.pipeline.tiny_stage import TinyModel
from tinkex.checkpoint.retention import StepRetention
from tinkex.errors import CheckpointError
from tinkex.pipeline.checkpoints import step_files
from tinkex.pipeline.checkpoints.saver import StepWriter, TensorSnapshot
from tinkex.pipeline.checkpoints.step_directory import REPLACED_PREFIX, list_steps
from tinkex.pipeline.checkpoints.step_files import (
    StepContent,
    check_disk_space,
    count_tensor_bytes,
    read_step,
    write_step,
)
from tinkex.pipeline.weights import named_weights

STATE = {"epoch": 0, "step_in_epoch": 0, "global_step": 1}


def content(value: float) -> StepContent:
    weights = {"weight": torch.full((8,), value)}
    return StepContent(weights=weights, optimizer={"optimizer": {}, "scaler": {}}, state=STATE)


def test_snapshot_is_independent_of_its_source() -> None:
    tensor = torch.ones(4)
    copied = TensorSnapshot().copy_tree({"a": [tensor, (tensor + 1, 5)], "b": "text"})
    tensor.zero_()
    assert copied["a"][0].tolist() == [1.0] * 4
    assert copied["a"][1][0].tolist() == [2.0] * 4
    assert (copied["a"][1][1], copied["b"]) == (5, "text")


def test_snapshot_reuses_buffers_and_keeps_ties() -> None:
    snapshot, weights = TensorSnapshot(), named_weights(TinyModel(8))
    first, second = snapshot.copy_tree(weights), snapshot.copy_tree(weights)
    assert {name: value.data_ptr() for name, value in first.items()} == {
        name: value.data_ptr() for name, value in second.items()
    }
    assert second["embed.weight"] is second["lm_head.weight"]
    grown = snapshot.copy_tree(named_weights(TinyModel(16)))
    assert grown["hidden.weight"].shape == (16, 16)


def test_training_continues_while_a_step_is_written(tmp_path: Path) -> None:
    writer, model = StepWriter(tmp_path, StepRetention()), nn.Linear(4, 4)
    may_write = threading.Event()

    def slow(weights: Mapping[str, Tensor]) -> None:
        assert may_write.wait(timeout=30)

    expected = model.weight.detach().clone()
    saved = StepContent(weights=named_weights(model), optimizer={"optimizer": {}}, state=STATE)
    writer.save(1, saved, write_extra=slow)
    writer.wait_for_copy()
    with torch.no_grad():
        model.weight.zero_()
    may_write.set()
    assert writer.close() == tmp_path / "step_00000001"
    assert torch.equal(read_step(tmp_path / "step_00000001").weights["weight"], expected)


def test_save_waits_for_the_previous_write(tmp_path: Path) -> None:
    writer, may_write = StepWriter(tmp_path, StepRetention()), threading.Event()

    def slow(weights: Mapping[str, Tensor]) -> None:
        assert may_write.wait(timeout=30)

    writer.save(1, content(1.0), write_extra=slow)
    second = threading.Thread(target=writer.save, args=(2, content(2.0)))
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive(), "the second save waits for the first"
    may_write.set()
    second.join(timeout=30)
    writer.close()
    assert [step for step, _ in list_steps(tmp_path)] == [2, 1]
    assert read_step(tmp_path / "step_00000001").weights["weight"].tolist() == [1.0] * 8


def test_failed_write_is_raised_at_the_next_save(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("not a directory")
    writer = StepWriter(root, StepRetention())
    writer.save(1, content(1.0))
    with pytest.raises(OSError, match="exists"):
        writer.save(2, content(1.0))
    assert writer.close() is None


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    write_step(tmp_path, 1, content(1.0))
    path = write_step(tmp_path, 1, content(2.0))
    assert read_step(path).weights["weight"].tolist() == [2.0] * 8
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_failed_replacement_keeps_the_old_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_step(tmp_path, 1, content(1.0))

    def fail(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tinkex.system.atomic.fsync_tree", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_step(tmp_path, 1, content(2.0))
    assert read_step(path).weights["weight"].tolist() == [1.0] * 8
    assert not list(tmp_path.glob(f"{REPLACED_PREFIX}*"))


def test_needed_space_counts_tied_weights_once() -> None:
    weights = named_weights(TinyModel(8))
    assert count_tensor_bytes(weights) == 4 * (32 * 8 + 8 * 8 + 8 + 8 + 8)


def test_too_little_space_is_reported_with_sizes(tmp_path: Path) -> None:
    check_disk_space(tmp_path, 10_000_000, lambda path: 20_000_000)
    with pytest.raises(CheckpointError, match=r"5\.0 MB free, but a checkpoint needs 11\.0 MB"):
        check_disk_space(tmp_path, 10_000_000, lambda path: 5_000_000)


def test_reading_a_step_executes_no_code(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, content(1.0))
    torch.save({"weight": Path("x")}, path / "model.pth")
    with pytest.raises(CheckpointError, match=r"model\.pth cannot be read"):
        read_step(path)


def test_step_records_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    settings = ("user.name=a", "user.email=a@b", "commit.gpgsign=false")
    git = ("git", "-C", str(project), *(word for one in settings for word in ("-c", one)))
    subprocess.run((*git, "init", "-q"), check=True)
    subprocess.run((*git, "commit", "-q", "--allow-empty", "-m", "one"), check=True)
    head = subprocess.run((*git, "rev-parse", "HEAD"), check=True, capture_output=True, text=True)
    monkeypatch.chdir(project)
    step_files._versions.cache_clear()
    path = write_step(tmp_path / "root", 1, replace(content(1.0), config={"stage": "sft"}))
    versions = json.loads((path / "config.json").read_text())["versions"]
    assert versions == {
        "format": step_files.FORMAT_VERSION,
        "revision": head.stdout.strip(),
        "tinkex": tinkex.__version__,
        "torch": torch.__version__,
    }
    monkeypatch.chdir(tmp_path)
    step_files._versions.cache_clear()
    assert step_files._versions()["revision"] is None
    step_files._versions.cache_clear()
