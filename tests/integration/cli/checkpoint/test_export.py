"""`checkpoint export` of PEFT adapters and merged models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.cli.checkpoint.download_sources import (
    ADAPTER,
    contents,
    manifest,
    offer_archive,
    tar,
)
from tests.integration.cli.conftest import RunCli, SeededServer
from tests.support.adapters import (
    load_peft,
    load_plain,
    make_layout,
    make_model,
    make_spec,
    make_state,
    plain_logprobs,
    sites_of,
)
from tinkex.cli.context import Context, Screen
from tinkex.engine.checkpoints import merge
from tinkex.engine.checkpoints.adapter_files import write_checkpoint
from tinkex.engine.checkpoints.metadata import METADATA_NAME, OPTIMIZER_NAME, STATE_NAME
from tinkex.engine.models import sources
from tinkex.home import Home
from tinkex.installation import install_command
from tinkex.testing import Fault

PEFT_FILES = {"adapter_config.json", "adapter_model.safetensors"}
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture
def seeded(shared_seeded: SeededServer) -> SeededServer:
    """Nothing here changes the server."""
    return shared_seeded


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny base model."""
    folder = tmp_path / "base"
    make_model("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A training checkpoint as stored by a server: adapter, optimizer, manifest."""
    folder = tmp_path / "trained"
    folder.mkdir()
    spec = make_spec()
    layout = make_layout(sites_of(make_model("qwen3")), spec)
    write_checkpoint(folder, spec, layout, make_state(layout), with_optimizer=True)
    (folder / "manifest.json").write_bytes(manifest(contents(folder)))
    return folder


@pytest.fixture
def offered(seeded: SeededServer, trained: Path) -> str:
    """The same checkpoint on a server."""
    offer_archive(seeded.server, tar(contents(trained)))
    return seeded.training


def with_adapter(base: Path, trained: Path) -> torch.Tensor:
    return plain_logprobs(load_peft(load_plain(base).float(), trained))


# --- PEFT ------------------------------------------------------------------------------------


def test_peft_loads_exported_adapter(
    offered: str, base: Path, trained: Path, tinkex: RunCli, tmp_path: Path
) -> None:
    assert {METADATA_NAME, STATE_NAME, OPTIMIZER_NAME} <= set(contents(trained))
    out = tmp_path / "out" / "adapter"
    found = tinkex("checkpoint", "export", offered, "-o", str(out), "--json").json
    assert set(contents(out)) == PEFT_FILES
    assert found == {
        "checkpoint_path": offered,
        "format": "peft",
        "dtype": None,
        "destination": str(out),
        "base_model": make_spec().base_model,
        "file_size_bytes": sum(map(len, contents(out).values())),
        "num_files": 2,
    }
    exported = plain_logprobs(load_peft(load_plain(base).float(), out))
    torch.testing.assert_close(exported, with_adapter(base, trained), **TOLERANCE)
    assert [path.name for path in out.parent.iterdir()] == ["adapter"]


def test_downloaded_folder_is_exported_without_server(
    trained: Path, tinkex: RunCli, tmp_path: Path
) -> None:
    before = contents(trained)
    result = tinkex("checkpoint", "export", str(trained), "-o", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert "PEFT adapter" in result.out
    assert set(contents(tmp_path / "out")) == PEFT_FILES
    assert contents(trained) == before


def test_corrupted_folder_is_not_exported(trained: Path, tinkex: RunCli, tmp_path: Path) -> None:
    weights = trained / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    failed = tinkex("checkpoint", "export", str(trained), "-o", str(tmp_path / "out"))
    assert failed.exit_code == 1
    assert "'adapter_model.safetensors' of 'trained' is damaged" in " ".join(failed.err.split())
    assert not (tmp_path / "out").exists()


def test_existing_output_is_replaced_only_with_force_and_on_success(
    seeded: SeededServer, trained: Path, tinkex: RunCli, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    words = ("checkpoint", "export", seeded.training, "-o", str(out))
    refused = tinkex(*words, "--json")
    assert "already exists" in refused.failure["message"]
    seeded.server.inject("download", Fault(status=403), times=None)
    assert tinkex(*words, "--force").exit_code == 1
    assert contents(out) == {"mine.txt": b"keep"}
    seeded.server.clear_faults()
    assert tinkex(*words, "--force").exit_code == 0
    assert set(contents(out)) == PEFT_FILES
    hidden = [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")]
    assert hidden == []


def test_overlapping_folders_are_rejected(
    seeded: SeededServer, tinkex: RunCli, tmp_path: Path
) -> None:
    source = tmp_path / "ck"
    assert tinkex("checkpoint", "download", seeded.training, "-o", str(source)).exit_code == 0
    before = sorted(source.iterdir())
    for output in (source / "peft", source, tmp_path):
        result = tinkex("checkpoint", "export", str(source), "-o", str(output), "--force")
        assert result.exit_code == 1
        assert "overlap" in result.err
    assert sorted(source.iterdir()) == before


def test_folder_without_adapter_is_rejected(
    seeded: SeededServer, tinkex: RunCli, tmp_path: Path
) -> None:
    offer_archive(seeded.server, tar({"something.bin": b"x"}))
    words = ("checkpoint", "export", seeded.training, "-o", str(tmp_path / "out"))
    assert "does not contain a PEFT adapter" in tinkex(*words).err
    seeded.server.clear_faults()
    offer_archive(seeded.server, tar({f"{name}.age": data for name, data in ADAPTER.items()}))
    refused = tinkex(*words, "--json")
    assert "is encrypted" in refused.failure["message"]
    assert "--identity FILE" in refused.failure["hint"]
    assert not (tmp_path / "out").exists()


# --- merged ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_transformers_loads_merged_model(
    dtype: str | None, offered: str, base: Path, trained: Path, tinkex: RunCli, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["checkpoint", "export", offered, "-o", str(out), "--merge"]
    words += ["--base-model-path", str(base), *(["--dtype", dtype] if dtype else []), "--json"]
    found = tinkex(*words).json
    assert (found["format"], found["dtype"]) == ("merged", dtype)
    model = load_plain(out)
    if dtype is None:
        torch.testing.assert_close(
            plain_logprobs(model.float()), with_adapter(base, trained), **TOLERANCE
        )
    kinds = {tensor.dtype for tensor in load_file(out / "model.safetensors").values()}
    assert kinds == {torch.bfloat16 if dtype else torch.float32}


def test_base_model_is_found_in_home(
    trained: Path, base: Path, tinkex: RunCli, tmp_path: Path
) -> None:
    home = Home(tmp_path / ".tinkex")
    home.create()
    sources.write_model_list(home.models_file, {make_spec().base_model: str(base)})
    screen = Screen(is_terminal=True, width=100)
    out = tmp_path / "out"
    result = tinkex(
        *("checkpoint", "export", str(trained), "-o", str(out), "--merge"),
        context=Context(stdout=Screen(width=100), stderr=screen),
    )
    assert result.exit_code == 0
    assert "Merging" in result.err
    assert (out / "config.json").exists()


def test_missing_base_model_error_has_hint(trained: Path, tinkex: RunCli, tmp_path: Path) -> None:
    words = ("checkpoint", "export", str(trained), "-o", str(tmp_path / "out"), "--merge")
    refused = tinkex(*words, "--json")
    assert make_spec().base_model in refused.failure["message"]
    assert "--base-model-path" in refused.failure["hint"]
    config = json.loads((trained / "adapter_config.json").read_bytes())
    del config["base_model_name_or_path"]
    (trained / "adapter_config.json").write_text(json.dumps(config))
    (trained / "manifest.json").unlink()
    assert "does not name its base model" in tinkex(*words).err
    assert not (tmp_path / "out").exists()


def test_missing_torch_error_has_install_command(
    seeded: SeededServer, tinkex: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_downloads = len(seeded.server.calls("download"))
    monkeypatch.delitem(sys.modules, merge.__name__)
    monkeypatch.setitem(sys.modules, "torch", None)
    words = ("checkpoint", "export", seeded.training, "-o", str(tmp_path / "out"), "--merge")
    refused = tinkex(*words, "--json")
    assert refused.failure["message"] == "this command needs torch, which is not installed"
    assert refused.failure["hint"] == f"Run: {install_command('torch')}"
    assert len(seeded.server.calls("download")) == num_downloads


@pytest.mark.parametrize("flags", [("--dtype", "float16"), ("--base-model-path", "/")])
def test_merge_options_need_merge(flags: tuple[str, str], tinkex: RunCli) -> None:
    refused = tinkex("checkpoint", "export", "tinker://run/weights/x", "-o", "out", *flags)
    assert refused.exit_code == 2
    assert f"{flags[0]} needs --merge." in refused.err


def test_interrupted_merge_leaves_no_files(
    trained: Path, base: Path, tinkex: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(merge, "_copy_other_files", interrupt)
    words = ("checkpoint", "export", str(trained), "-o", str(tmp_path / "out"), "--merge")
    result = tinkex(*words, "--base-model-path", str(base))
    assert result.exit_code == 130
    assert {path.name for path in tmp_path.iterdir()} == before
