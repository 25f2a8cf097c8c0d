"""Checkpoints and snapshots: bit-exact round trips, and detection of damaged files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.support.adapters import BASE, make_layout, make_model, make_spec, make_state, sites_of
from tinkex.engine.adapters import AdapterState
from tinkex.engine.checkpoints.adapter_files import (
    read_adapter,
    read_adapter_weights,
    read_optimizer,
    read_snapshot,
    write_checkpoint,
    write_snapshot,
)
from tinkex.errors import CheckpointError, ConfigError, InvalidInput
from tinkex.nn.lora_layout import LoraLayout, LoraTarget, TargetKind

WEIGHTS, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"
SNAPSHOT = "snapshot.safetensors"
SPEC = make_spec(4)


@cache
def sites(kind: str = "qwen3") -> tuple[LoraTarget, ...]:
    return tuple(sites_of(make_model(kind)))


@cache
def layout() -> LoraLayout:
    return make_layout(sites(), SPEC)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A training checkpoint."""
    directory = tmp_path / "saved"
    directory.mkdir()
    write_checkpoint(directory, SPEC, layout(), make_state(layout()), with_optimizer=True)
    return directory


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot in the middle of a step."""
    directory = tmp_path / "kept"
    directory.mkdir()
    write_snapshot(directory, SPEC, layout(), make_state(layout(), with_gradient=True))
    return directory


@pytest.mark.parametrize("dtype", ["F8_E4M3", "MADE_UP"])
def test_damaged_header_names_the_tensor(saved: Path, dtype: str) -> None:
    path = saved / OPTIMIZER
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    name = min(name for name in header if name != "__metadata__")
    header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    with pytest.raises(CheckpointError) as refused:
        read_optimizer(saved, SPEC, layout())
    assert OPTIMIZER in refused.value.message
    assert name in refused.value.message
    assert dtype in refused.value.message


def is_same_state(left: AdapterState, right: AdapterState) -> bool:
    """Whether two states are bit-identical."""
    return left.num_steps == right.num_steps and all(
        (a is None and b is None) or (a is not None and b is not None and same_bits(a, b))
        for a, b in [
            (left.weights, right.weights),
            (left.first, right.first),
            (left.second, right.second),
            (left.gradient, right.gradient),
        ]
    )


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rank": 1},
        {"train_unembed": False},
        {"train_mlp": False},
        {"alpha": 5.5, "target_modules": ("q_proj", "down_proj")},
    ],
    ids=str,
)
def test_checkpoint_round_trip_is_bit_exact(
    tmp_path: Path, kind: str, change: dict[str, Any]
) -> None:
    spec = replace(SPEC, **change)
    layout = make_layout(sites(kind), spec)
    state = make_state(layout)
    write_checkpoint(tmp_path, spec, layout, state, with_optimizer=True)
    assert same_bits(read_adapter_weights(tmp_path, spec, layout), state.weights)
    first, second, num_steps = read_optimizer(tmp_path, spec, layout)
    assert same_bits(first, state.first)
    assert same_bits(second, state.second)
    assert num_steps == 3
    found, weights, scale = read_adapter(tmp_path, BASE, sites(kind))
    assert scale == spec.scale
    assert (found.rank, found.size) == (spec.rank, layout.size)
    assert same_bits(weights, state.weights)


def test_checkpoint_file_list(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {
        "adapter_config.json",
        WEIGHTS,
        OPTIMIZER,
        "trainer_state.json",
        "tinkex.json",
    }
    config = json.loads((saved / "adapter_config.json").read_text())
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", BASE)
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    state = json.loads((saved / "trainer_state.json").read_text())
    assert state == {"num_steps": 3, "optimizer": "adamw", "seed": 7, "format": 1}
    tensors = load_file(saved / WEIGHTS)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    query = "base_model.model.model.layers.1.self_attn.q_proj"
    assert tensors[f"{query}.lora_A.weight"].shape == (4, 32)
    assert tensors[f"{query}.lora_B.weight"].shape == (32, 4)


def test_sampler_checkpoint_has_no_optimizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, layout(), make_state(layout()), with_optimizer=False)
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_config.json",
        WEIGHTS,
        "tinkex.json",
    }
    with pytest.raises(InvalidInput, match="the checkpoint has no optimizer state"):
        read_optimizer(tmp_path, SPEC, layout())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_model": "other"}, "saved with base_model 'tiny/model', but .* has 'other'"),
        ({"rank": 16}, "saved with rank 4, but the adapter has 16; create one with rank 4"),
        ({"train_unembed": False}, "train_unembed True, but the adapter has False"),
        ({"train_mlp": False}, "saved with train_mlp True"),
        ({"train_attn": False}, "saved with train_attn True"),
    ],
)
def test_incompatible_checkpoint_is_rejected(
    saved: Path, change: dict[str, Any], reason: str
) -> None:
    spec = replace(SPEC, **change)
    with pytest.raises(InvalidInput, match=reason):
        read_adapter_weights(saved, spec, make_layout(sites(), spec))


def test_other_optimizer_is_rejected(saved: Path) -> None:
    spec = replace(SPEC, optimizer={"type": "dimuon"})
    with pytest.raises(InvalidInput, match=r"optimizer is 'adamw', but .* with 'dimuon'"):
        read_optimizer(saved, spec, layout())


def test_sampler_rejects_adapter_of_other_base_model(saved: Path) -> None:
    with pytest.raises(InvalidInput, match="is of base model 'tiny/model', not of 'other'"):
        read_adapter(saved, "other", sites())


def test_moments_do_not_depend_on_buffer_order(tmp_path: Path) -> None:
    state = make_state(layout())
    write_checkpoint(tmp_path, SPEC, layout(), state, with_optimizer=True)
    write_snapshot(tmp_path, SPEC, layout(), state)
    turned = make_layout(tuple(reversed(sites())), SPEC)
    restored = read_snapshot(tmp_path, SPEC, turned)
    memory = read_optimizer(tmp_path, SPEC, turned)
    for ours, theirs in [(state.first, memory.first), (state.second, restored.second)]:
        expected = {pair.path: pair for pair in layout().pairs(ours)}
        for path, down, up in turned.pairs(theirs):
            assert torch.equal(down, expected[path].down)
            assert torch.equal(up, expected[path].up)


# --- damage --------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


def rewrite(change: Callable[[str, torch.Tensor], tuple[str, Any]]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = dict(change(name, x) for name, x in load_file(path).items())
        save_file({name: x.contiguous() for name, x in tensors.items()}, path)

    return damage


reshape = rewrite(lambda name, x: (name, x[:3]))
narrow = rewrite(lambda name, x: (name, x.half()))
rename = rewrite(lambda name, x: (f"{name}.x", x))
poison = rewrite(lambda name, x: (name, x * float("nan")))


def drop_one(path: Path) -> None:
    tensors = load_file(path)
    del tensors[max(tensors)]
    save_file(tensors, path)


def add_one(path: Path) -> None:
    save_file(load_file(path) | {"more": torch.zeros(1)}, path)


def later_format(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))


def negative(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_steps": -1}))


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        *[
            (name, damage, f"saved/{name}{reason}")
            for name in (WEIGHTS, OPTIMIZER)
            for damage, reason in [
                (Path.unlink, " is missing"),
                (truncate, " cannot be read"),
                (garble, " cannot be read"),
                (reshape, r": .* has shape \(3, \d+\), expected"),
                (narrow, ": .* is F16, expected F32"),
                (rename, " has no tensor"),
                (drop_one, " has no tensor"),
                (add_one, " has a tensor 'more', which the adapter does not have"),
                (poison, ": .* has non-finite values"),
            ]
        ],
        ("tinkex.json", truncate, "saved/tinkex.json cannot be read"),
        ("tinkex.json", garble, "saved/tinkex.json cannot be read"),
        ("tinkex.json", later_format, "tinkex.json has format 3, .* reads up to 2; upgrade"),
        ("trainer_state.json", Path.unlink, "saved/trainer_state.json is missing"),
        ("trainer_state.json", garble, "saved/trainer_state.json cannot be read"),
        ("trainer_state.json", later_format, "trainer_state.json has format 3"),
        ("trainer_state.json", negative, "trainer_state.json cannot be read: Expected `int` >= 0"),
    ],
)
def test_damaged_checkpoint_names_the_file(
    saved: Path, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    damage(saved / name)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_adapter_weights(saved, SPEC, layout())
        read_optimizer(saved, SPEC, layout())
    assert str(saved.parent) not in str(caught.value)


def test_missing_directory_reports_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none/adapter_config.json is missing"):
        read_adapter_weights(tmp_path / "none", SPEC, layout())


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, "tinkex.json", "trainer_state.json"])
def test_io_error_is_not_reported_as_damage(saved: Path, name: str) -> None:
    (saved / name).unlink()
    (saved / name).mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory") as caught:
        read_adapter_weights(saved, SPEC, layout())
        read_optimizer(saved, SPEC, layout())
    assert isinstance(caught.value.__cause__, OSError)


class Damaged:
    """A file whose content is damaged in many ways."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        state = make_state(layout(), with_gradient=True)
        write_checkpoint(directory, SPEC, layout(), state, with_optimizer=True)
        write_snapshot(directory, SPEC, layout(), state)
        self.contents = {path.name: path.read_bytes() for path in directory.iterdir()}

    def read(self, name: str, content: bytes) -> Any:
        """Read the file with its content replaced."""
        (self.directory / name).write_bytes(content)
        try:
            if name == SNAPSHOT:
                return read_snapshot(self.directory, SPEC, layout())
            if name == WEIGHTS:
                return read_adapter_weights(self.directory, SPEC, layout())
            return read_optimizer(self.directory, SPEC, layout())
        finally:
            (self.directory / name).write_bytes(self.contents[name])


@pytest.fixture(scope="module")
def damaged() -> Iterator[Damaged]:
    with TemporaryDirectory() as directory:
        yield Damaged(Path(directory))


FILES = st.sampled_from([WEIGHTS, OPTIMIZER, SNAPSHOT])


@given(name=FILES, data=st.data())
@settings(max_examples=150, deadline=None)
def test_truncated_file_is_damaged(damaged: Damaged, name: str, data: st.DataObject) -> None:
    content = damaged.contents[name]
    length = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        damaged.read(name, content[:length])


@given(name=FILES, more=st.binary(min_size=1, max_size=100))
@settings(max_examples=30, deadline=None)
def test_file_with_extra_bytes_is_damaged(damaged: Damaged, name: str, more: bytes) -> None:
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        damaged.read(name, damaged.contents[name] + more)


@given(name=FILES, data=st.data())
@settings(max_examples=300, deadline=None)
def test_flipped_header_bit_is_detected_or_harmless(
    damaged: Damaged, name: str, data: st.DataObject
) -> None:
    content = bytearray(damaged.contents[name])
    (length,) = struct.unpack("<Q", content[:8])
    at, bit = data.draw(st.integers(0, 8 + length - 1)), data.draw(st.integers(0, 7))
    content[at] ^= 1 << bit
    try:
        found = damaged.read(name, bytes(content))
    except CheckpointError as error:
        assert name in error.message
        return
    except ConfigError as error:
        assert name == SNAPSHOT
        assert "has changed" in error.message
        return
    # A bit of mere information, such as the seed; the manifest's digests detect that.
    before = damaged.read(name, damaged.contents[name])
    for left, right in zip(tensors_of(before), tensors_of(found), strict=True):
        assert same_bits(left, right)


def tensors_of(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    fields = [getattr(found, name, None) for name in ("weights", "first", "second", "gradient")]
    return [one for one in fields if one is not None]


# --- snapshots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_snapshot_round_trip_is_bit_exact(tmp_path: Path, kind: str, with_gradient: bool) -> None:
    layout = make_layout(sites(kind), SPEC)
    state = make_state(layout, with_gradient=with_gradient)
    write_snapshot(tmp_path, SPEC, layout, state)
    assert [path.name for path in tmp_path.iterdir()] == [SNAPSHOT]
    assert is_same_state(read_snapshot(tmp_path, SPEC, layout), state)


def test_non_finite_state_is_restored(tmp_path: Path) -> None:
    state = make_state(layout())
    for path, down, _ in layout().pairs(state.weights):
        down[0, 0] = float("nan") if "layers.0" in path else float("-inf")
    write_snapshot(tmp_path, SPEC, layout(), state)
    assert is_same_state(read_snapshot(tmp_path, SPEC, layout()), state)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Path.unlink, "kept/snapshot.safetensors is missing"),
        (garble, "kept/snapshot.safetensors cannot be read"),
        (reshape, "snapshot.safetensors has no valid metadata"),
    ],
)
def test_damaged_snapshot_is_reported(
    snapshot: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(snapshot / SNAPSHOT)
    with pytest.raises(CheckpointError, match=reason):
        read_snapshot(snapshot, SPEC, layout())


def test_snapshot_of_other_adapter_is_rejected(snapshot: Path) -> None:
    with pytest.raises(CheckpointError, match=r"snapshot.safetensors is of .*rank=4.*rank=5"):
        read_snapshot(snapshot, replace(SPEC, rank=5), layout())


def test_replaced_base_model_is_a_config_error(snapshot: Path) -> None:
    larger = sites_of(make_model("qwen3", num_hidden_layers=3))
    with pytest.raises(ConfigError, match=r"'tiny/model' has changed: .* restore the former"):
        read_snapshot(snapshot, SPEC, make_layout(larger, SPEC))
    assert read_snapshot(snapshot, SPEC, layout()).num_steps == 3


def test_only_trained_modules_are_saved(tmp_path: Path) -> None:
    spec = replace(SPEC, train_mlp=False, train_unembed=False)
    small = make_layout(sites(), spec)
    write_snapshot(tmp_path, spec, small, make_state(small))
    paths = [path for site in sites() if site.kind is TargetKind.ATTENTION for path in site.paths]
    assert set(load_file(tmp_path / SNAPSHOT)) == {
        f"{buffer}.{path}.{side}"
        for buffer in ("weights", "first", "second")
        for path in paths
        for side in ("lora_A", "lora_B")
    }
