"""A merged folder gives the same results in plain transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedModel

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
from tests.support.tiny_model_folders import save_tokenizer
from tinkex.engine.checkpoints import merge, merge_plan
from tinkex.engine.checkpoints.adapter_files import write_checkpoint
from tinkex.engine.checkpoints.merge import MergeProgress, merge_adapter
from tinkex.engine.checkpoints.merge_plan import read_deltas
from tinkex.errors import CheckpointError, ConfigError, InvalidInput

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
#: Small enough that a tiny model is saved as several files.
SHARD = "20KB"


class Case:
    """A base folder, an adapter folder, and their expected results."""

    def __init__(self, root: Path, model: PreTrainedModel, **options: Any) -> None:
        self.base, self.adapter, self.out = root / "base", root / "adapter", root / "out"
        shard = options.pop("shard", "1GB")
        model.save_pretrained(self.base, max_shard_size=shard)
        save_tokenizer(self.base, model.config.vocab_size)
        spec = make_spec(**options)
        layout = make_layout(sites_of(model), spec)
        self.adapter.mkdir()
        write_checkpoint(self.adapter, spec, layout, make_state(layout), with_optimizer=False)
        self.model = model
        self.before = plain_logprobs(load_plain(self.base).float())
        self.expected = plain_logprobs(load_peft(load_plain(self.base).float(), self.adapter))

    def check(self, **tolerance: float) -> PreTrainedModel:
        merged = load_plain(self.out)
        found = plain_logprobs(merged.float())
        torch.testing.assert_close(found, self.expected, **(TOLERANCE | tolerance))
        assert (found - self.before).abs().max() > 0.1
        return merged


@pytest.fixture
def no_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the streaming merge."""
    monkeypatch.setattr(merge, "plan_merge", lambda *args: None)


def reject_in_memory(*args: Any) -> None:
    raise AssertionError("this folder should be merged piece by piece")


# --- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["1GB", SHARD])
@pytest.mark.parametrize("train_unembed", [True, False])
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3", False), ("qwen2", True)])
def test_merged_model_matches_base_with_adapter(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    tied: bool,
    train_unembed: bool,
    shard: str,
) -> None:
    monkeypatch.setattr(merge, "_merge_in_memory", reject_in_memory)
    model = make_model(kind, tied=tied)
    case = Case(tmp_path, model, train_unembed=train_unembed, shard=shard)
    merge_adapter(case.base, case.adapter, case.out)
    merged = case.check()
    assert merged.config.tie_word_embeddings is (tied and not train_unembed)
    embedding = merged.get_input_embeddings().weight
    assert torch.equal(embedding, case.model.get_input_embeddings().weight)


@pytest.mark.parametrize("shard", ["1GB", SHARD])
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_merged_in_any_storage_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shard: str
) -> None:
    monkeypatch.setattr(merge, "_merge_in_memory", reject_in_memory)
    case = Case(tmp_path, make_model(kind), shard=shard)
    merge_adapter(case.base, case.adapter, case.out)
    case.check()
    assert stored_names(case.out) == stored_names(case.base)


@pytest.mark.usefixtures("no_streaming")
@pytest.mark.parametrize(
    ("kind", "tied"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", False), ("gpt_oss", False)]
)
def test_merge_in_memory(tmp_path: Path, kind: str, tied: bool) -> None:
    case = Case(tmp_path, make_model(kind, tied=tied))
    merge_adapter(case.base, case.adapter, case.out)
    merged = case.check()
    assert merged.config.tie_word_embeddings is False


def test_pickled_weights_are_merged(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3", tied=True))
    torch.save(case.model.state_dict(), case.base / "pytorch_model.bin")
    (case.base / "model.safetensors").unlink()
    merge_adapter(case.base, case.adapter, case.out)
    case.check()
    assert not (case.out / "pytorch_model.bin").exists()


def test_converted_parameter_names_are_merged(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3"))
    path = case.base / "model.safetensors"
    tensors = {name.removeprefix("model."): x for name, x in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    merge_adapter(case.base, case.adapter, case.out)
    case.check()


def test_peft_adapter_is_merged(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3"))
    (case.adapter / "tinkex.json").unlink()
    config_path = case.adapter / "adapter_config.json"
    config = json.loads(config_path.read_text()) | {"lora_alpha": 8, "use_rslora": True}
    config_path.write_text(json.dumps(config))
    case.expected = plain_logprobs(load_peft(deepcopy(case.model), case.adapter))
    merge_adapter(case.base, case.adapter, case.out)
    case.check()


def test_stored_tied_head_is_replaced(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3", tied=True))
    path = case.base / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    merge_adapter(case.base, case.adapter, case.out)
    case.check()


def test_chunk_size_does_not_change_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, make_model("gpt_oss", tied=True))
    merge_adapter(case.base, case.adapter, case.out)
    monkeypatch.setattr(merge, "CHUNK_NUMBERS", 100)
    merge_adapter(case.base, case.adapter, tmp_path / "small")
    left, right = (load_file(path / "model.safetensors") for path in (case.out, tmp_path / "small"))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, rtol=0.0, atol=1e-6)


# --- output ------------------------------------------------------------------------------------


def stored_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names


def test_unadapted_weights_are_bit_identical(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen2"), train_mlp=False, train_unembed=False)
    merge_adapter(case.base, case.adapter, case.out)
    before = load_file(case.base / "model.safetensors")
    after = load_file(case.out / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qkvo"
    }


def test_tokenizer_is_copied_and_other_weights_are_not(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3"))
    for name in ("chat_template.jinja", "model.gguf", "optimizer.pt", ".hidden"):
        (case.base / name).write_text("x")
    (case.base / "original").mkdir()
    (case.base / "link.json").symlink_to(case.base / "config.json")
    merge_adapter(case.base, case.adapter, case.out)
    names = {path.name for path in case.out.iterdir()}
    assert "chat_template.jinja" in names
    assert not names & {"model.gguf", "optimizer.pt", ".hidden", "original"}
    assert not (case.out / "link.json").is_symlink()
    assert AutoTokenizer.from_pretrained(case.out)("hi") == AutoTokenizer.from_pretrained(
        case.base
    )("hi")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_merge_saves_requested_dtype(tmp_path: Path, dtype: str, stored: torch.dtype) -> None:
    case = Case(tmp_path, make_model("qwen3", tied=True).to(stored), shard=SHARD)
    merge_adapter(case.base, case.adapter, case.out, dtype=dtype)
    merged = load_plain(case.out)
    assert merged.dtype == getattr(torch, dtype)
    index = json.loads((case.out / "model.safetensors.index.json").read_text())
    files = list(case.out.glob("*.safetensors"))
    numbers = sum(tensor.numel() for file in files for tensor in load_file(file).values())
    assert index["metadata"]["total_size"] == numbers * merged.dtype.itemsize
    case.check(atol=1e-4 if dtype == "float32" else 0.3)


def test_merge_keeps_dtype_by_default(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3").bfloat16())
    merge_adapter(case.base, case.adapter, case.out)
    assert load_plain(case.out).dtype == torch.bfloat16
    # Rounded once, from an exact sum.
    before = load_file(case.base / "model.safetensors")
    after = load_file(case.out / "model.safetensors")
    for name, delta in read_deltas(case.adapter, case.model).items():
        expected = (before[name].float() + delta.rows(0, delta.shape[0])).bfloat16()
        assert torch.equal(after[name], expected)


def test_progress_reaches_total(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3", tied=True), shard=SHARD)
    reports: list[MergeProgress] = []
    merge_adapter(case.base, case.adapter, case.out, progress=reports.append)
    done = [progress.done_bytes for progress in reports]
    assert done == sorted(done)
    assert done[-1] == reports[-1].total_bytes
    assert len({progress.total_bytes for progress in reports}) == 1


# --- invalid input -----------------------------------------------------------------------------


def leftover_files(case: Case) -> list[str]:
    return [
        path.name for path in case.out.parent.iterdir() if path not in (case.base, case.adapter)
    ]


def test_existing_folder_is_not_replaced(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3"))
    case.out.mkdir()
    (case.out / "mine").write_text("x")
    with pytest.raises(InvalidInput, match="out exists already"):
        merge_adapter(case.base, case.adapter, case.out)
    assert (case.out / "mine").read_text() == "x"


def test_mismatched_adapter_is_rejected(tmp_path: Path) -> None:
    case = Case(tmp_path / "a", make_model("qwen3"))
    other = Case(tmp_path / "b", make_model("qwen3", hidden_size=64))
    with pytest.raises(InvalidInput, match=r"pair for 'lm_head' .* has \(\d+, 64\); use the base"):
        merge_adapter(other.base, case.adapter, other.out)
    deeper = Case(tmp_path / "c", make_model("qwen3", num_hidden_layers=3))
    with pytest.raises(
        InvalidInput, match=r"'model.layers.2.*, which is not a linear layer of the base"
    ):
        merge_adapter(case.base, deeper.adapter, case.out)
    assert leftover_files(other) == leftover_files(case) == []


def test_unknown_dtype_is_rejected(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3"))
    with pytest.raises(InvalidInput, match="dtype is 'int8'; expected one of float32, bfloat16"):
        merge_adapter(case.base, case.adapter, case.out, dtype="int8")


@pytest.mark.parametrize("is_whole", [True, False])
def test_overflow_of_dtype_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    case = Case(tmp_path, make_model("qwen3"))
    path = case.adapter / "adapter_model.safetensors"
    save_file({name: tensor * 1e4 for name, tensor in load_file(path).items()}, path)
    if is_whole:
        monkeypatch.setattr(merge, "plan_merge", lambda *args: None)
    with pytest.raises(
        InvalidInput, match=r"torch.float16 cannot represent; merge with dtype float32"
    ):
        merge_adapter(case.base, case.adapter, case.out, dtype="float16")
    assert leftover_files(case) == []


def test_damaged_adapter_is_rejected(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3"))
    path = case.adapter / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"adapter/adapter_model.safetensors cannot be read"):
        merge_adapter(case.base, case.adapter, case.out)
    path.write_bytes(content)
    tensors = load_file(path)
    first = min(tensors)
    save_file(tensors | {first: tensors[first] * float("nan")}, path)
    with pytest.raises(InvalidInput, match="has non-finite values"):
        merge_adapter(case.base, case.adapter, case.out)
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, path)
    with pytest.raises(InvalidInput, match="is not part of a LoRA pair"):
        merge_adapter(case.base, case.adapter, case.out)
    (case.adapter / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter/adapter_config.json is missing"):
        merge_adapter(case.base, case.adapter, case.out)


def test_unusable_base_model_is_rejected(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3"))
    with pytest.raises(ConfigError, match="does not exist"):
        merge_adapter(tmp_path / "none", case.adapter, case.out)
    with pytest.raises(ConfigError, match="is an adapter, not a base model"):
        merge_adapter(case.adapter, case.adapter, case.out)
    path = case.base / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match=r"is quantized \(gptq\)"):
        merge_adapter(case.base, case.adapter, case.out)


@pytest.mark.usefixtures("no_streaming")
def test_missing_weights_are_not_randomized(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3"))
    path = case.base / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no weights for 'model.layers.1.mlp.up_proj.weight'"):
        merge_adapter(case.base, case.adapter, case.out)
    assert leftover_files(case) == []


# --- the plan ------------------------------------------------------------------------------------


def test_parts_of_one_parameter_are_adjacent(tmp_path: Path) -> None:
    case = Case(tmp_path, make_model("qwen3_moe"))
    deltas = read_deltas(case.adapter, case.model)
    plan = merge_plan.plan_merge(case.base, case.model, deltas, None)
    assert plan is not None
    order = [piece.source.parameter for piece in plan.tensors if piece.source]
    runs = [name for at, name in enumerate(order) if at == 0 or order[at - 1] != name]
    assert len(runs) == len(set(runs)) == len(deltas)
