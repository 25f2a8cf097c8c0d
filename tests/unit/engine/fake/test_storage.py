"""Checkpoints and snapshots of the fake engine: bit-exact round trips, invalid files rejected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.unit.engine.fake.conftest import BASE, SPEC, logprobs, run, train
from tinkex.engine.fake.engine import FakeEngine
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.types import AdamParams

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def saved(engine: FakeEngine, tmp_path: Path) -> Path:
    """A training checkpoint of two steps."""
    directory = tmp_path / "saved"
    directory.mkdir()
    train(engine, steps=2)
    engine.save("a", directory, with_optimizer=True)
    return directory


def state(engine: FakeEngine, adapter_id: str = "a") -> list[Any]:
    """The complete state of an adapter."""
    trainer = engine._adapters[adapter_id].trainer
    tables = (trainer.model.logits_VV, *trainer.moments[1:], trainer.gradient_VV)
    return [trainer.moments.num_steps, *(None if t is None else t.tobytes() for t in tables)]


# --- checkpoints ---------------------------------------------------------------------------------


def test_checkpoint_has_adapter_and_optimizer_files(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {
        "adapter_config.json",
        WEIGHTS,
        "optimizer.safetensors",
        "trainer_state.json",
        "tinkex.json",
    }
    config = json.loads((saved / "adapter_config.json").read_text())
    assert (config["peft_type"], config["base_model_name_or_path"], config["r"]) == (
        "LORA",
        BASE,
        8,
    )
    [table] = load_file(saved / WEIGHTS).values()
    assert (table.dtype, table.shape) == (np.float64, (512, 512))


def test_sampler_checkpoint_has_no_optimizer(engine: FakeEngine, tmp_path: Path) -> None:
    engine.save("a", tmp_path, with_optimizer=False)
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_config.json",
        WEIGHTS,
        "tinkex.json",
    }
    engine.load("a", tmp_path, with_optimizer=False)
    with pytest.raises(InvalidInput, match="the checkpoint has no optimizer state"):
        engine.load("a", tmp_path, with_optimizer=True)


def test_resumed_training_is_bit_identical(engine: FakeEngine, saved: Path) -> None:
    other = FakeEngine()
    other.create("b", SPEC)
    run(other, "b")
    other.load("b", saved, with_optimizer=True)
    assert state(other, "b") == state(engine)
    train(engine, "a", steps=3)
    train(other, "b", steps=3)
    assert state(other, "b") == state(engine)


def test_save_optimizer_before_first_step(engine: FakeEngine, tmp_path: Path) -> None:
    engine.save("a", tmp_path, with_optimizer=True)
    train(engine)
    engine.load("a", tmp_path, with_optimizer=True)
    assert engine.optim_step("a", AdamParams())["step"] == 1.0


def test_load_without_optimizer_resets_it(engine: FakeEngine, saved: Path) -> None:
    scores = logprobs(engine)
    train(engine)
    run(engine)
    engine.load("a", saved, with_optimizer=False)
    assert logprobs(engine) == scores
    metrics = engine.optim_step("a", AdamParams())
    assert (metrics["step"], metrics["has_gradient"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_model": "other"}, "saved with base_model 'tinkex/bigram', but .* has 'other'"),
        ({"rank": 16}, "saved with rank 8, but the adapter has 16; create one with rank 8"),
        ({"train_unembed": False}, "saved with train_unembed True, but the adapter has False"),
        ({"train_mlp": False}, "saved with train_mlp True"),
        ({"train_attn": False}, "saved with train_attn True"),
        ({"optimizer": {"type": "dimuon"}}, "optimizer is 'adamw', but .* with 'dimuon'"),
    ],
)
def test_incompatible_checkpoint_is_rejected(
    saved: Path, change: dict[str, Any], reason: str
) -> None:
    engine = FakeEngine((BASE, "other"))
    engine.create("b", replace(SPEC, **change))
    before = state(engine, "b")
    with pytest.raises(InvalidInput, match=reason):
        engine.load("b", saved, with_optimizer=True)
    assert state(engine, "b") == before


def test_checkpoint_with_other_seed_is_compatible(saved: Path) -> None:
    engine = FakeEngine()
    engine.create("b", replace(SPEC, seed=99))
    engine.load("b", saved, with_optimizer=True)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


def reshape(path: Path) -> None:
    save_file({name: table[:7] for name, table in load_file(path).items()}, path)


def narrow(path: Path) -> None:
    save_file({name: table.astype(np.float32) for name, table in load_file(path).items()}, path)


def rename(path: Path) -> None:
    save_file({f"other.{name}": table for name, table in load_file(path).items()}, path)


def poison(path: Path) -> None:
    save_file({name: np.full_like(table, np.nan) for name, table in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        (WEIGHTS, Path.unlink, "saved/adapter_model.safetensors is missing"),
        (WEIGHTS, truncate, "saved/adapter_model.safetensors cannot be read"),
        (WEIGHTS, garble, "saved/adapter_model.safetensors cannot be read"),
        (WEIGHTS, reshape, r"float64 of shape \(7, 512\), expected float64 of shape \(512, 512\)"),
        (WEIGHTS, narrow, "is float32 of shape"),
        (WEIGHTS, rename, "has no table 'bigram.logits'"),
        (WEIGHTS, poison, "bigram.logits has non-finite values"),
        ("tinkex.json", Path.unlink, "saved/tinkex.json is missing"),
        ("tinkex.json", truncate, "saved/tinkex.json cannot be read"),
        ("tinkex.json", garble, "saved/tinkex.json cannot be read"),
        ("trainer_state.json", Path.unlink, "saved/trainer_state.json is missing"),
        ("trainer_state.json", garble, "saved/trainer_state.json cannot be read"),
        ("optimizer.safetensors", Path.unlink, "saved/optimizer.safetensors is missing"),
        ("optimizer.safetensors", truncate, "saved/optimizer.safetensors cannot be read"),
    ],
)
def test_damaged_checkpoint_is_rejected_without_changes(
    engine: FakeEngine, saved: Path, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    before = state(engine)
    damage(saved / name)
    with pytest.raises(InvalidInput, match=reason):
        engine.load("a", saved, with_optimizer=True)
    assert state(engine) == before


def test_missing_directory_is_rejected(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"the checkpoint cannot be loaded: none/tinkex.json is"):
        engine.load("a", tmp_path / "none", with_optimizer=False)


# --- snapshots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("num_passes", [0, 2])
def test_restored_adapter_is_bit_identical(
    engine: FakeEngine, tmp_path: Path, steps: int, num_passes: int
) -> None:
    train(engine, steps=steps)
    for _ in range(num_passes):
        run(engine)
    engine.snapshot("a")(tmp_path)
    other = FakeEngine()
    other.restore("a", SPEC, tmp_path)
    assert state(other) == state(engine)
    for each in (engine, other):
        each.optim_step("a", AdamParams(learning_rate=0.1))
        train(each)
    assert state(other) == state(engine)


def test_snapshot_is_not_changed_by_later_training(engine: FakeEngine, tmp_path: Path) -> None:
    train(engine)
    run(engine)
    before = state(engine)
    write = engine.snapshot("a")
    run(engine)
    train(engine)
    engine.drop("a")
    write(tmp_path)
    engine.restore("a", SPEC, tmp_path)
    assert state(engine) == before


def test_damaged_snapshot_is_a_server_error(engine: FakeEngine, tmp_path: Path) -> None:
    engine.snapshot("a")(tmp_path)
    with pytest.raises(CheckpointError, match=r"the snapshot in .* expected .*rank=9"):
        engine.restore("b", replace(SPEC, rank=9), tmp_path)
    truncate(tmp_path / "snapshot.safetensors")
    with pytest.raises(CheckpointError, match=r"snapshot.safetensors cannot be read"):
        engine.restore("b", SPEC, tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match=r"tinkex.json is missing"):
        engine.restore("b", SPEC, tmp_path)
    assert not engine.has_adapter("b")
