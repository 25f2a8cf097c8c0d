"""Training resumes bit-identically from checkpoints and snapshots."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.engine.conftest import MakeEngine
from tests.support.engine_calls import datum, forward_backward, spec, step, weights
from tinkex.engine.protocol import AdapterSpec, SamplerSource
from tinkex.engine.torch_engine import TorchEngine
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.types import AdamParams

NUM_STEPS = 3


def train(engine: TorchEngine, adapter_id: str, first: int = 0, num_steps: int = NUM_STEPS) -> list:
    """Train some steps; returns all outputs and metrics."""
    results = []
    for number in range(first, first + num_steps):
        data = [datum(10 * number + index, length) for index, length in enumerate((5, 12, 9))]
        output = forward_backward(engine, adapter_id, *data)
        logprobs = [one["logprobs"].to_numpy().tobytes() for one in output.loss_fn_outputs]
        results.append(
            (dict(output.metrics), logprobs, step(engine, adapter_id, weight_decay=0.01))
        )
    return results


def accumulate(engine: TorchEngine, adapter_id: str, seed: int = 77) -> None:
    """Accumulate a gradient without a step."""
    forward_backward(engine, adapter_id, datum(seed))


def save(engine: TorchEngine, directory: Path, *, with_optimizer: bool = True) -> Path:
    directory.mkdir()
    engine.save("a", directory, with_optimizer=with_optimizer)
    return directory


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


@pytest.fixture
def trained(engine: TorchEngine) -> TorchEngine:
    """An engine with a trained adapter `a`."""
    engine.create("a", spec())
    train(engine, "a")
    return engine


def test_dimuon_resumes_identically(make_engine: MakeEngine, tmp_path: Path) -> None:
    def continue_training(engine: TorchEngine, adapter_id: str) -> list[dict[str, float]]:
        results = []
        for number in range(NUM_STEPS):
            forward_backward(engine, adapter_id, datum(number))
            results.append(step(engine, adapter_id, grad_clip_norm=1.0))
        return results

    engine, other = make_engine(), make_engine()
    dimuon = spec(optimizer={"type": "dimuon", "version": 1})
    engine.create("a", dimuon)
    continue_training(engine, "a")
    saved = save(engine, tmp_path / "saved")
    accumulate(engine, "a")
    restored(engine, other, tmp_path / "snapshot")
    engine.create("b", dimuon)
    engine.load("b", saved, with_optimizer=True)
    accumulate(engine, "b")
    ahead = continue_training(engine, "a")
    assert [ahead[-1]["step"], ahead[-1]["clipped"]] == [2 * NUM_STEPS, 1.0]
    assert continue_training(other, "a") == continue_training(engine, "b") == ahead
    assert torch.equal(weights(other, "a"), weights(engine, "a"))
    assert torch.equal(weights(engine, "b"), weights(engine, "a"))
    state = other._adapters["a"].state
    assert state.second is None
    assert torch.equal(state.first, engine._adapters["a"].state.first)
    with pytest.raises(InvalidInput, match="'adamw', but the adapter trains with 'dimuon'"):
        engine.optim_step("a", AdamParams())


# --- save and load -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_new_engine", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_training_resumes_identically_from_checkpoint(
    trained: TorchEngine, make_engine: MakeEngine, tmp_path: Path, is_new_engine: bool, seed: int
) -> None:
    saved = save(trained, tmp_path / "saved")
    ahead = train(trained, "a", NUM_STEPS)
    other = make_engine() if is_new_engine else trained
    # Its initial weights do not matter.
    other.create("b", spec(seed=seed))
    other.load("b", saved, with_optimizer=True)
    assert train(other, "b", NUM_STEPS) == ahead
    assert torch.equal(weights(other, "b"), weights(trained, "a"))
    mine, theirs = trained._adapters["a"].state, other._adapters["b"].state
    assert torch.equal(mine.first, theirs.first)
    assert torch.equal(mine.second, theirs.second)
    assert mine.num_steps == theirs.num_steps == 2 * NUM_STEPS


def test_adapter_loads_its_own_checkpoint(trained: TorchEngine, tmp_path: Path) -> None:
    saved = save(trained, tmp_path / "saved")
    ahead = train(trained, "a", NUM_STEPS)
    trained.load("a", saved, with_optimizer=True)
    assert train(trained, "a", NUM_STEPS) == ahead


@pytest.mark.parametrize("was_saved", [True, False])
def test_load_without_optimizer_resets_moments(
    trained: TorchEngine, tmp_path: Path, was_saved: bool
) -> None:
    saved = save(trained, tmp_path / "saved", with_optimizer=was_saved)
    before = weights(trained, "a")
    (ahead,) = train(trained, "a", NUM_STEPS, 1)
    trained.create("b", spec(seed=2))
    train(trained, "b")
    trained.load("b", saved, with_optimizer=False)
    state = trained._adapters["b"].state
    assert torch.equal(state.weights, before)
    assert state.num_steps == 0
    assert state.first is None
    assert state.second is None
    (results,) = train(trained, "b", NUM_STEPS, 1)
    # The pass is the same; the step is the first one.
    assert results[:2] == ahead[:2]
    assert (results[2]["step"], ahead[2]["step"]) == (1, NUM_STEPS + 1)
    assert not torch.equal(weights(trained, "b"), weights(trained, "a"))


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_load_drops_accumulated_gradient(
    trained: TorchEngine, tmp_path: Path, with_optimizer: bool
) -> None:
    accumulate(trained, "a")
    saved = save(trained, tmp_path / "saved")
    trained.load("a", saved, with_optimizer=with_optimizer)
    before = weights(trained, "a")
    assert step(trained, "a")["has_gradient"] == 0.0
    assert torch.equal(weights(trained, "a"), before)


def test_save_keeps_accumulated_gradient(trained: TorchEngine, tmp_path: Path) -> None:
    trained.create("b", spec())
    train(trained, "b")
    accumulate(trained, "a")
    accumulate(trained, "b")
    save(trained, tmp_path / "saved")
    assert step(trained, "a") == step(trained, "b")
    assert torch.equal(weights(trained, "a"), weights(trained, "b"))


def test_same_state_gives_same_files(trained: TorchEngine, tmp_path: Path) -> None:
    first, second = save(trained, tmp_path / "one"), save(trained, tmp_path / "two")
    before = digests(first)
    assert before == digests(second)
    trained.create("b", spec())
    # What was loaded must not be a view of the file, nor share memory with another adapter.
    for name in ("a", "b"):
        trained.load(name, first, with_optimizer=True)
    loaded = weights(trained, "b")
    train(trained, "a", NUM_STEPS)
    assert torch.equal(weights(trained, "b"), loaded)
    assert not torch.equal(weights(trained, "a"), loaded)
    assert digests(first) == before


@pytest.mark.parametrize(
    ("wanted", "results"),
    [
        (spec(rank=4), "rank 8, but the adapter has 4"),
        (spec(train_unembed=False), "train_unembed True, but the adapter has False"),
        (spec(train_mlp=False), "train_mlp True, but the adapter has False"),
        (spec(train_attn=False), "train_attn True, but the adapter has False"),
    ],
)
def test_mismatched_checkpoint_is_rejected_without_changes(
    trained: TorchEngine, tmp_path: Path, wanted: AdapterSpec, results: str
) -> None:
    saved = save(trained, tmp_path / "saved")
    trained.create("other", wanted)
    accumulate(trained, "other")
    before = trained._adapters["other"].state.copy_to_cpu()
    with pytest.raises(InvalidInput, match=results):
        trained.load("other", saved, with_optimizer=True)
    after = trained._adapters["other"].state
    assert torch.equal(after.weights, before.weights)
    assert after.gradient is not None
    assert before.gradient is not None
    assert torch.equal(after.gradient, before.gradient)


def test_missing_optimizer_is_rejected(trained: TorchEngine, tmp_path: Path) -> None:
    saved = save(trained, tmp_path / "saved", with_optimizer=False)
    before = weights(trained, "a")
    train(trained, "a", NUM_STEPS, 1)
    moved = weights(trained, "a")
    with pytest.raises(InvalidInput, match="no optimizer state; load it without the optimizer"):
        trained.load("a", saved, with_optimizer=True)
    # Nothing was loaded, not even the weights, which fit.
    assert torch.equal(weights(trained, "a"), moved)
    assert not torch.equal(moved, before)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b""),
    ],
)
@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json"]
)
def test_damaged_checkpoint_is_rejected_without_changes(
    trained: TorchEngine, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    saved = save(trained, tmp_path / "saved")
    damage(saved / name)
    train(trained, "a", NUM_STEPS, 1)
    before = weights(trained, "a")
    with pytest.raises(InvalidInput, match=f"cannot be loaded: saved/{name}"):
        trained.load("a", saved, with_optimizer=True)
    assert torch.equal(weights(trained, "a"), before)
    assert trained._adapters["a"].state.num_steps == NUM_STEPS + 1


# --- snapshot and restore ------------------------------------------------------------------------


def restored(engine: TorchEngine, other: TorchEngine, directory: Path) -> TorchEngine:
    directory.mkdir()
    engine.snapshot("a")(directory)
    other.restore("a", engine._adapters["a"].spec, directory)
    return other


@pytest.mark.parametrize("has_gradient", [True, False])
def test_restored_adapter_continues_identically(
    trained: TorchEngine, make_engine: MakeEngine, tmp_path: Path, has_gradient: bool
) -> None:
    if has_gradient:
        accumulate(trained, "a")
    other = restored(trained, make_engine(), tmp_path / "snapshot")
    state = other._adapters["a"].state
    assert (state.gradient is not None) == has_gradient
    # The next pass adds to the restored gradient.
    assert train(other, "a", NUM_STEPS) == train(trained, "a", NUM_STEPS)
    assert torch.equal(weights(other, "a"), weights(trained, "a"))


def test_restore_replaces_adapter_in_memory(trained: TorchEngine, tmp_path: Path) -> None:
    directory = tmp_path / "snapshot"
    directory.mkdir()
    trained.snapshot("a")(directory)
    ahead = train(trained, "a", NUM_STEPS)
    trained.restore("a", spec(), directory)
    assert train(trained, "a", NUM_STEPS) == ahead


def test_snapshot_is_not_affected_by_later_training(
    trained: TorchEngine, make_engine: MakeEngine, tmp_path: Path
) -> None:
    accumulate(trained, "a")
    before = trained._adapters["a"].state.copy_to_cpu()
    write = trained.snapshot("a")
    accumulate(trained, "a", seed=78)
    step(trained, "a")
    train(trained, "a", NUM_STEPS)
    trained.drop("a")
    directory = tmp_path / "snapshot"
    directory.mkdir()
    write(directory)
    other = make_engine()
    other.restore("a", spec(), directory)
    found = other._adapters["a"].state
    assert before.gradient is not None
    assert found.gradient is not None
    for name in ("weights", "first", "second", "gradient"):
        assert torch.equal(getattr(found, name), getattr(before, name)), name
    assert found.num_steps == before.num_steps == NUM_STEPS


def test_non_finite_state_is_restored(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(is_nonfinite_applied=True)
    engine.create("a", spec())
    broken = datum(3, weights=np.full(12, 3e38, np.float32))
    forward_backward(engine, "a", broken)
    step(engine, "a")
    forward_backward(engine, "a", broken)
    other = restored(engine, make_engine(), tmp_path / "snapshot")
    mine, theirs = engine._adapters["a"].state, other._adapters["a"].state
    assert not torch.isfinite(mine.weights).all()
    for name in ("weights", "first", "second", "gradient"):
        pair = getattr(mine, name), getattr(theirs, name)
        assert torch.equal(*(one.view(torch.int32) for one in pair)), name


def test_untrained_adapter_is_restored(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, other = make_engine(), make_engine()
    engine.create("a", spec(rank=3, train_mlp=False))
    restored(engine, other, tmp_path / "snapshot")
    assert train(other, "a") == train(engine, "a")


@pytest.mark.parametrize("other", [spec(rank=4), spec(train_unembed=False)])
def test_snapshot_of_other_adapter_is_rejected(
    trained: TorchEngine, tmp_path: Path, other: AdapterSpec
) -> None:
    directory = tmp_path / "snapshot"
    directory.mkdir()
    trained.snapshot("a")(directory)
    before = weights(trained, "a")
    with pytest.raises(CheckpointError, match=r"snapshot\.safetensors is of .*expected"):
        trained.restore("a", other, directory)
    assert torch.equal(weights(trained, "a"), before)


def test_truncated_snapshot_is_rejected(trained: TorchEngine, tmp_path: Path) -> None:
    directory = tmp_path / "snapshot"
    directory.mkdir()
    trained.snapshot("a")(directory)
    (path,) = directory.iterdir()
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cannot be read"):
        trained.restore("a", spec(), directory)


def test_missing_adapter_cannot_be_saved(engine: TorchEngine, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="adapter 'a' is not in memory"):
        engine.save("a", tmp_path, with_optimizer=True)
    with pytest.raises(LookupError, match="adapter 'a' is not in memory"):
        engine.load("a", tmp_path, with_optimizer=True)
    with pytest.raises(LookupError, match="adapter 'a' is not in memory"):
        engine.snapshot("a")
    assert list(tmp_path.iterdir()) == []


# --- memory --------------------------------------------------------------------------------------


def test_moments_are_allocated_at_first_step(
    engine: TorchEngine, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine.create("a", spec())
    accumulate(engine, "a")
    state = engine._adapters["a"].state
    assert state.first is None
    assert state.second is None
    engine.snapshot("a")(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 3 * state.weights.nbytes
    other = make_engine()
    other.restore("a", spec(), tmp_path)
    assert step(other, "a") == step(engine, "a")
    assert torch.equal(weights(other, "a"), weights(engine, "a"))
    assert torch.equal(other._adapters["a"].state.first, state.first)


def test_untrained_adapter_saves_zero_moments(engine: TorchEngine, tmp_path: Path) -> None:
    engine.create("a", spec())
    saved = save(engine, tmp_path / "saved")
    assert engine._adapters["a"].state.first is None
    engine.create("b", spec(seed=2))
    engine.load("b", saved, with_optimizer=True)
    assert not engine._adapters["b"].state.first.any()
    assert train(engine, "b") == train(engine, "a")


def test_adapter_larger_than_budget_is_rejected(make_engine: MakeEngine) -> None:
    needed = make_engine().training_bytes(spec())
    tight = make_engine(adapter_bytes=needed - 1)
    with pytest.raises(InvalidInput, match=f"needs {needed:,} bytes.*raise adapter_bytes"):
        tight.create("a", spec())
    make_engine(adapter_bytes=needed).create("a", spec())


def test_sampler_adapters_stay_within_budget(
    trained: TorchEngine, make_engine: MakeEngine, tmp_path: Path
) -> None:
    directories = [save(trained, tmp_path / f"saved-{number}") for number in range(4)]
    size = trained._adapters["a"].state.weights.nbytes
    engine = make_engine(sampler_bytes=5 * size)
    host = engine._registry.get(spec().base_model).hosted_model
    for directory in (directories[0], *directories):
        source = SamplerSource(base_model=spec().base_model, directory=directory)
        engine._load_sampler_adapter(source, host)
        assert engine._sampler_adapters.size <= 5 * size
    assert 1 <= len(engine._sampler_adapters) < 4
