"""Checkpoints are compatible with PEFT in both directions."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.support.adapters import (
    adapted,
    hosted_logprobs,
    load_peft,
    make_layout,
    make_model,
    make_spec,
    make_state,
    plain_logprobs,
    sites_of,
)
from tinkex.engine.checkpoints.adapter_files import (
    read_adapter,
    read_adapter_weights,
    write_checkpoint,
)
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.nn.hosted_model import HostedModel

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


# --- ours, loaded by PEFT ------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 32])
@pytest.mark.parametrize("train_unembed", [True, False])
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3", False), ("qwen2", False)])
def test_peft_matches_hosted_model(
    tmp_path: Path, kind: str, tied: bool, train_unembed: bool, rank: int
) -> None:
    model = make_model(kind, tied=tied)
    plain, host = deepcopy(model), HostedModel(model)
    spec = make_spec(rank, train_unembed=train_unembed)
    layout = make_layout(host.lora_targets, spec)
    state = make_state(layout)
    write_checkpoint(tmp_path, spec, layout, state, with_optimizer=True)
    before = plain_logprobs(plain)
    found = plain_logprobs(load_peft(plain, tmp_path))
    torch.testing.assert_close(found, hosted_logprobs(host, layout, state.weights), **TOLERANCE)
    assert (found - before).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe", "mixtral"])
def test_peft_matches_hosted_experts(tmp_path: Path, kind: str) -> None:
    model = make_model(kind)
    plain, host, spec = deepcopy(model), HostedModel(model), make_spec(3)
    layout = make_layout(host.lora_targets, spec)
    state = make_state(layout)
    write_checkpoint(tmp_path, spec, layout, state, with_optimizer=False)
    found = plain_logprobs(load_peft(plain, tmp_path))
    torch.testing.assert_close(found, hosted_logprobs(host, layout, state.weights), **TOLERANCE)


@pytest.mark.parametrize("parts", ["train_attn", "train_mlp", "train_unembed"])
def test_peft_adapts_the_same_modules(tmp_path: Path, parts: str) -> None:
    plain = make_model("qwen3")
    flags = dict.fromkeys(["train_attn", "train_mlp", "train_unembed"], False) | {parts: True}
    spec = make_spec(**flags)
    layout = make_layout(sites_of(plain), spec)
    write_checkpoint(tmp_path, spec, layout, make_state(layout), with_optimizer=False)
    loaded = load_peft(plain, tmp_path)
    found = {name for name, module in loaded.named_modules() if hasattr(module, "lora_A")}
    assert found == {f"base_model.model.{path}" for path in adapted(layout)}


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_peft_loads_expert_pairs(tmp_path: Path, kind: str, rank: int) -> None:
    plain = make_model(kind)
    spec = make_spec(rank, train_attn=False, train_unembed=False)
    layout = make_layout(sites_of(plain), spec)
    state = make_state(layout)
    write_checkpoint(tmp_path, spec, layout, state, with_optimizer=False)
    expected = deepcopy(plain)
    with torch.no_grad():
        for path, down, up in layout.pairs(state.weights):
            table = expected.get_parameter(path)
            delta = (up @ down) * (32 / rank)
            table += delta.mT if kind == "gpt_oss" else delta
    found = plain_logprobs(load_peft(deepcopy(plain), tmp_path))
    torch.testing.assert_close(found, plain_logprobs(expected), **TOLERANCE)
    assert (found - plain_logprobs(plain)).abs().max() > 0.1
    assert torch.equal(read_adapter_weights(tmp_path, spec, layout), state.weights)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss"])
def test_peft_loads_experts_and_other_modules(tmp_path: Path, kind: str) -> None:
    plain = make_model(kind)
    spec = make_spec()
    layout = make_layout(sites_of(plain), spec)
    state = make_state(layout)
    write_checkpoint(tmp_path, spec, layout, state, with_optimizer=False)
    loaded = load_peft(deepcopy(plain), tmp_path)
    theirs = {name: tensor for name, tensor in loaded.state_dict().items() if ".lora_" in name}
    ours = load_file(tmp_path / "adapter_model.safetensors")
    assert len(theirs) == len(ours)
    for name, tensor in ours.items():
        assert torch.equal(theirs[name.replace(".weight", ".default.weight")], tensor), name
    with torch.no_grad():
        for path, down, up in layout.pairs(state.weights):
            weight = plain.get_parameter(path if down.ndim == 3 else f"{path}.weight")
            delta = (up @ down) * (32 / spec.rank)
            weight += delta.mT if delta.ndim == 3 and kind == "gpt_oss" else delta
    torch.testing.assert_close(plain_logprobs(loaded), plain_logprobs(plain), **TOLERANCE)


# --- PEFT's, loaded by us ------------------------------------------------------------------------


def peft_folder(path: Path, **options: Any) -> tuple[Any, torch.Tensor]:
    """A model, and its log-probabilities with an adapter that PEFT saved in `path`."""
    model = make_model("qwen3")
    plain = deepcopy(model)
    config = LoraConfig(**({"r": 4, "target_modules": LINEAR} | options))
    adapter = get_peft_model(plain, config)
    rng = torch.Generator().manual_seed(3)
    for name, parameter in adapter.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.2, generator=rng)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
        adapter.save_pretrained(path)
    return model, plain_logprobs(adapter.eval())


@pytest.mark.parametrize(
    "options",
    [{"lora_alpha": 32}, {"lora_alpha": 8}, {"lora_alpha": 7.5}, {"use_rslora": True}],
    ids=str,
)
def test_peft_adapter_gives_same_results(tmp_path: Path, options: dict[str, Any]) -> None:
    model, expected = peft_folder(tmp_path, **options)
    host, spec = HostedModel(model), make_spec(4)
    layout = make_layout(host.lora_targets, spec)
    weights = read_adapter_weights(tmp_path, spec, layout)
    torch.testing.assert_close(hosted_logprobs(host, layout, weights), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("modules", "flags"),
    [
        (LINEAR[:4], {"train_mlp": False, "train_unembed": False}),
        (LINEAR[4:7], {"train_attn": False, "train_unembed": False}),
        (LINEAR[7:], {"train_attn": False, "train_mlp": False}),
        (LINEAR[4:], {"train_attn": False}),
        (["q_proj", "v_proj"], {"target_modules": ("q_proj", "v_proj")}),
    ],
    ids=str,
)
def test_adapted_modules_are_read_from_a_peft_folder(
    tmp_path: Path, modules: list[str], flags: dict[str, Any]
) -> None:
    model, expected = peft_folder(tmp_path, target_modules=modules, lora_alpha=16)
    host = HostedModel(model)
    saved = read_adapter(tmp_path, "whatever", host.lora_targets)
    assert adapted(saved.layout) == adapted(make_layout(host.lora_targets, make_spec(4, **flags)))
    found = hosted_logprobs(host, *saved)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_peft_adapter_of_some_modules_continues_unchanged(tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}
    model, expected = peft_folder(tmp_path, lora_alpha=16, **options)
    host = HostedModel(model)
    spec = make_spec(4, alpha=16.0, use_rslora=True, target_modules=("q_proj", "down_proj"))
    layout = make_layout(host.lora_targets, spec)
    weights = read_adapter_weights(tmp_path, spec, layout)
    assert torch.equal(weights, read_adapter(tmp_path, "x", host.lora_targets).weights)
    found = hosted_logprobs(host, layout, weights, spec.scale)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_half_precision_adapter_is_loaded(tmp_path: Path) -> None:
    model, _ = peft_folder(tmp_path, lora_alpha=32)
    path = tmp_path / "adapter_model.safetensors"
    narrow = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(narrow, path)
    layout = make_layout(sites_of(model), make_spec(4))
    pairs = {
        pair.path: pair
        for pair in layout.pairs(read_adapter_weights(tmp_path, make_spec(4), layout))
    }
    for name, tensor in narrow.items():
        path_, _, side = name.removeprefix("base_model.model.").partition(".lora_")
        if side:
            found = pairs[path_].down if side.startswith("A") else pairs[path_].up
            assert torch.equal(found, tensor.float())


@pytest.mark.parametrize(
    ("options", "rank", "reason"),
    [
        ({}, 8, "saved with rank 4, but the adapter has 8; create one with rank 4"),
        ({"target_modules": LINEAR[:2]}, 4, "has no tensor .*lora_A"),
        ({"use_dora": True}, 4, "use_dora True; only plain LoRA"),
        ({"rank_pattern": {"q_proj": 2}}, 4, "rank_pattern {'q_proj': 2}"),
        ({"alpha_pattern": {"q_proj": 2}}, 4, "alpha_pattern {'q_proj': 2}"),
        ({"bias": "all"}, 4, "bias 'all'"),
        ({"modules_to_save": ["embed_tokens"]}, 4, r"modules_to_save \['embed_tokens'\]"),
        ({"init_lora_weights": "pissa"}, 4, "init_lora_weights 'pissa'"),
    ],
    ids=str,
)
def test_only_plain_lora_is_accepted(
    tmp_path: Path, options: dict[str, Any], rank: int, reason: str
) -> None:
    model, _ = peft_folder(tmp_path, **options)
    spec = make_spec(rank)
    with pytest.raises(InvalidInput, match=reason):
        read_adapter_weights(tmp_path, spec, make_layout(sites_of(model), spec))


def rewritten(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = {name: change(name, x).contiguous() for name, x in load_file(path).items()}
        save_file(tensors, path)

    return rewrite


def reconfigured(**fields: Any) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return rewrite


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rewritten(lambda _, x: x[:, :3]), r"has shape \(\d+, 3\), expected"),
        (rewritten(lambda _, x: x * float("nan")), "has non-finite values"),
        (rewritten(lambda _, x: x.to(torch.int32)), "is I32, expected F64 or F32 or F16 or BF16"),
        (reconfigured(peft_type="IA3"), "peft_type is 'IA3'"),
        (reconfigured(r=0), "of rank 0"),
    ],
)
def test_invalid_peft_adapter_is_a_user_error(
    tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    model, _ = peft_folder(tmp_path)
    change(tmp_path)
    spec = make_spec(4)
    with pytest.raises(InvalidInput, match=reason):
        read_adapter_weights(tmp_path, spec, make_layout(sites_of(model), spec))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (reconfigured(r="8"), "adapter_config.json cannot be read: Expected `int`"),
        (lambda folder: (folder / "adapter_config.json").write_text("["), "cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is missing"),
    ],
)
def test_unreadable_peft_adapter_is_damage(
    tmp_path: Path, change: Callable[[Path], Any], reason: str
) -> None:
    model, _ = peft_folder(tmp_path)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        read_adapter_weights(tmp_path, make_spec(4), make_layout(sites_of(model), make_spec(4)))
    with pytest.raises(CheckpointError, match=reason):
        read_adapter(tmp_path, "whatever", sites_of(model))


def test_checkpoint_without_metadata_is_read_as_peft(tmp_path: Path) -> None:
    spec = make_spec()
    layout = make_layout(sites_of(make_model("qwen3")), spec)
    state = make_state(layout)
    write_checkpoint(tmp_path, spec, layout, state, with_optimizer=False)
    (tmp_path / "tinkex.json").unlink()
    assert torch.equal(read_adapter_weights(tmp_path, spec, layout), state.weights)
    assert torch.equal(
        read_adapter_weights(tmp_path, replace(spec, base_model="x"), layout), state.weights
    )
