"""The step checkpoints of training scripts: what is found, what stays, what comes back."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from tinkex.errors import CheckpointError, InvalidInput
from trainer.checkpoint_manager import (
    is_valid_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)


def make_fake(root: Path, step: int) -> Path:
    """A checkpoint of three files, as other programs may have left it."""
    path = root / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "model.pth").write_bytes(b"0")
    (path / "optimizer.pt").write_bytes(b"0")
    (path / "state.json").write_text("{}")
    return path


def test_signatures_do_not_change() -> None:
    agreed = {
        is_valid_checkpoint: (["path"], []),
        latest_checkpoint: (["ckpt_root"], []),
        prune_checkpoints: (["ckpt_root", "keep_last"], []),
        save_checkpoint: ([], ["ckpt_root", "step", "model", "optimizer", "scaler", "state"]),
        load_checkpoint: ([], ["ckpt_path", "model", "optimizer", "scaler", "device"]),
    }
    for function, (positional, keywords) in agreed.items():
        spec = inspect.getfullargspec(function)
        assert (spec.args, spec.kwonlyargs) == (positional, keywords)


def test_latest_checkpoint_picks_highest_step(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    make_fake(root, 2)
    newest = make_fake(root, 10)
    (root / "step_00000001").mkdir()
    (root / "step_00000011").mkdir()
    assert latest_checkpoint(str(root)) == str(newest)


def test_prune_keeps_last(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        make_fake(root, step)
    prune_checkpoints(str(root), keep_last=1)
    assert [path.name for path in root.iterdir() if path.is_dir()] == ["step_00000003"]


def test_save_and_load_checkpoint_roundtrip(tmp_path: Path) -> None:
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    path = save_checkpoint(
        ckpt_root=str(tmp_path / "checkpoints"),
        step=7,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        state={"epoch": 1, "step_in_epoch": 3, "global_step": 7},
    )
    other = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    state = load_checkpoint(
        ckpt_path=path, model=twin, optimizer=other, scaler=scaler, device="cpu"
    )
    assert state["epoch"] == 1
    assert state["step_in_epoch"] == 3
    assert state["global_step"] == 7
    assert torch.equal(model.weight, twin.weight)
    saved, loaded = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert torch.equal(saved[0]["exp_avg"], loaded[0]["exp_avg"])


def save(root: Path, step: int, model: nn.Module, **state: object) -> Path:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = save_checkpoint(
        ckpt_root=root, step=step, model=model, optimizer=optimizer, scaler=None, state=state
    )
    return Path(found)


def load(path: Path, model: nn.Module) -> dict[str, object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return load_checkpoint(
        ckpt_path=path, model=model, optimizer=optimizer, scaler=None, device="cpu"
    )


def test_device_and_path_arguments_are_saved_as_text(tmp_path: Path) -> None:
    args = {"device": torch.device("cpu"), "out": Path("out")}
    path = save(tmp_path, 1, nn.Linear(2, 2), args=args)
    assert load(path, nn.Linear(2, 2))["args"] == {"device": "cpu", "out": "out"}


def test_wrapped_model_is_saved_and_loaded_without_prefix(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    bare = nn.Linear(3, 3)
    path = save(tmp_path, 1, Wrapper(bare))
    assert set(torch.load(path / "model.pth", weights_only=True)) == {"weight", "bias"}
    twin = nn.Linear(3, 3)
    load(path, Wrapper(twin))
    assert torch.equal(bare.weight, twin.weight)


# What torch's own modules say when its compiler is loaded.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_model_is_saved_without_prefix(tmp_path: Path) -> None:
    bare, twin = nn.Linear(3, 3), nn.Linear(3, 3)
    # Wrapping compiles nothing until the first call.
    path = save(tmp_path, 1, torch.compile(bare, backend="eager"))  # type: ignore[arg-type]
    assert set(torch.load(path / "model.pth", weights_only=True)) == {"weight", "bias"}
    load(path, torch.compile(twin, backend="eager"))  # type: ignore[arg-type]
    assert torch.equal(bare.weight, twin.weight)


def test_weights_saved_with_a_prefix_by_others_still_load(tmp_path: Path) -> None:
    bare, twin = nn.Linear(3, 3), nn.Linear(3, 3)
    path = save(tmp_path, 1, bare)
    (path / "manifest.json").unlink()
    prefixed = {f"_orig_mod.{name}": value for name, value in bare.state_dict().items()}
    torch.save(prefixed, path / "model.pth")
    load(path, twin)
    assert torch.equal(bare.weight, twin.weight)


def test_mismatched_weights_are_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    with pytest.raises(CheckpointError, match=r"not in the model \(1\.weight.*0\.weight 3x3"):
        load(path, nn.Sequential(nn.Linear(4, 3)))


def test_truncated_checkpoint_is_skipped_for_the_previous_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = save(tmp_path, 1, nn.Linear(2, 2))
    bad = save(tmp_path, 2, nn.Linear(2, 2))
    with (bad / "model.pth").open("r+b") as file:
        file.truncate(10)
    assert not is_valid_checkpoint(bad)
    assert latest_checkpoint(tmp_path) == str(good)
    assert "model.pth has 10 bytes" in caplog.text


def test_changed_byte_is_detected_at_load(tmp_path: Path) -> None:
    path = save(tmp_path, 1, nn.Linear(2, 2))
    content = bytearray((path / "model.pth").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "model.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        load(path, nn.Linear(2, 2))


def test_latest_checkpoint_ignores_modification_times(tmp_path: Path) -> None:
    old = make_fake(tmp_path, 3)
    newest = make_fake(tmp_path, 20)
    (old / "state.json").touch()
    old.touch()
    assert latest_checkpoint(tmp_path) == str(newest)


def test_keep_last_of_zero_and_a_missing_root_do_nothing(tmp_path: Path) -> None:
    make_fake(tmp_path, 1)
    prune_checkpoints(tmp_path, 0)
    prune_checkpoints(tmp_path / "none", 3)
    assert latest_checkpoint(tmp_path) is not None
    assert latest_checkpoint(tmp_path / "none") is None


def test_random_generators_are_restored(tmp_path: Path) -> None:
    path = save(tmp_path, 1, nn.Linear(2, 2))
    expected = torch.rand(3)
    load(path, nn.Linear(2, 2))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"bad": object()}, r"state\['bad'\] is of type object"),
        ({"pair": (1, 2)}, r"state\['pair'\] is of type tuple"),
        ({"by_rank": {0: "a"}}, r"state\['by_rank'\] has the key 0"),
        ({"loss": float("nan")}, r"state\['loss'\] is nan"),
        ({"rows": [1, float("inf")]}, r"state\['rows'\]\[1\] is inf"),
        ({"tensor": torch.zeros(1)}, r"state\['tensor'\] is of type Tensor"),
        ({"text": "\ud800"}, "not valid Unicode"),
    ],
)
def test_state_that_json_would_change_is_rejected(
    tmp_path: Path, state: dict[str, object], message: str
) -> None:
    root = tmp_path / "checkpoints"
    with pytest.raises(InvalidInput, match=message):
        save(root, 1, nn.Linear(2, 2), **state)
    assert not root.exists()


def test_state_roundtrip_is_exact(tmp_path: Path) -> None:
    state = {"a": [1, 2.5, -0.0, True, None, "Grüße"], "b": {"c": {"d": []}}, "n": 2**80}
    model = nn.Linear(2, 2)
    path = save(tmp_path, 1, model, **state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = load_checkpoint(
        ckpt_path=path, model=model, optimizer=optimizer, scaler=None, device="cpu"
    )
    assert found == state
    assert str(found) == str(dict(sorted(state.items())))
