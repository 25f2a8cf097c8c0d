"""Exported folders and single-file weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.integration.pipeline.stage_inputs import SIZES, make_tokenizer, tiny_model, write_samples
from tinkex.engine.config import EngineConfig
from tinkex.engine.models.loading import load_base_model as load_in_engine
from tinkex.engine.models.model_folder import read_model_folder
from tinkex.errors import ConfigError
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.lora_training import SegmentedLora
from tinkex.nn.packed_attention import PackedAttention
from tinkex.pipeline.checkpoints.export import export_folder, legacy_name, write_legacy
from tinkex.pipeline.checkpoints.model_digest import digest_weights
from tinkex.pipeline.forward import PackedForward
from tinkex.pipeline.model import load_model, make_config
from tinkex.pipeline.tokenizer import TextTokenizer
from tinkex.pipeline.weights import named_weights


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return make_tokenizer(folder / "made", list(write_samples(folder).values()))


@pytest.fixture(params=[False, True], ids=["dense", "moe"])
def model(tokenizer: TextTokenizer, request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(tokenizer, use_moe=request.param)


def is_tied(model: Any) -> bool:
    return bool(model.lm_head.weight is model.model.embed_tokens.weight)


def test_exported_weights_equal_the_model_and_stay_tied(
    tmp_path: Path, tokenizer: TextTokenizer, model: PreTrainedModel
) -> None:
    assert is_tied(model)
    export_folder(model, tokenizer, tmp_path / "hf")
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        assert "lm_head.weight" not in set(file.keys())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert is_tied(theirs)
    for name, weight in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weight), name
    assert theirs.generation_config.eos_token_id == [tokenizer.end_of_turn, tokenizer.end_of_text]


def test_exported_folder_has_tokenizer_and_template(
    tmp_path: Path, tokenizer: TextTokenizer, model: PreTrainedModel
) -> None:
    export_folder(model, tokenizer, tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = theirs.apply_chat_template(
        [{"role": "user", "content": "Hi?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"


def test_server_loads_the_exported_folder(
    tmp_path: Path, tokenizer: TextTokenizer, model: PreTrainedModel
) -> None:
    export_folder(model, tokenizer, tmp_path / "hf")
    folder = read_model_folder(tmp_path / "hf")
    assert (folder.dtype, folder.has_tokenizer) == ("float32", True)
    assert folder.max_context_tokens == 2048
    loaded = load_in_engine("made", folder, EngineConfig(threads=1), 2048)
    assert loaded.eos_tokens == {tokenizer.end_of_turn, tokenizer.end_of_text}
    tokens_T = torch.arange(10, 40)
    rows = ForwardContext(SegmentedLora([]), PackedAttention([30]))
    run = PackedForward(model)
    with torch.no_grad():
        hidden = loaded.hosted_model.hidden_states(tokens_T, torch.arange(30), rows)
        theirs = loaded.hosted_model.lm_head.logits(hidden, rows.lora)[0]
        ours = run(tokens_T, [30]).states_TD @ run.head_VD.t()
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def test_repeated_export_replaces_the_folder(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    for seed in (1, 2):
        export_folder(tiny_model(tokenizer, seed=seed), tokenizer, tmp_path / "hf")
    found = load_model(tmp_path / "hf").state_dict()
    expected = tiny_model(tokenizer, seed=2).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_failed_export_keeps_the_old_folder(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tokenizer)
    export_folder(model, tokenizer, tmp_path / "hf")
    before = digest_weights(tmp_path / "hf")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        export_folder(model, tokenizer, tmp_path / "hf")
    assert digest_weights(tmp_path / "hf") == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("stage", "name"),
    [("pretrain", "pretrain_32"), ("sft", "full_sft_32"), ("dpo", "rlhf_32"), ("r1", "reason_32")],
)
def test_legacy_file_names(tokenizer: TextTokenizer, stage: str, name: str) -> None:
    assert legacy_name(stage, tiny_model(tokenizer).config) == f"{name}.pth"
    assert legacy_name(stage, tiny_model(tokenizer, use_moe=True).config) == f"{name}_moe.pth"


def test_legacy_weights_are_float16_and_tied(
    tmp_path: Path, tokenizer: TextTokenizer, model: PreTrainedModel
) -> None:
    path = tmp_path / "out" / "pretrain_32.pth"
    write_legacy(named_weights(model), path)
    found = torch.load(path, weights_only=True)
    assert found.keys() == model.state_dict().keys()
    assert {weight.dtype for weight in found.values()} == {torch.float16}
    head, table = found["lm_head.weight"], found["model.embed_tokens.weight"]
    assert head.data_ptr() == table.data_ptr()
    once = sum(parameter.numel() for parameter in model.parameters()) * 2
    assert path.stat().st_size < once + 40_000
    assert [path.name for path in path.parent.iterdir()] == ["pretrain_32.pth"]


def test_stage_starts_from_legacy_weights(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    model = tiny_model(tokenizer)
    write_legacy(named_weights(model), tmp_path / "a.pth")
    found = load_model(tmp_path / "a.pth", model.config)
    for name, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight.half().float())
    assert is_tied(found)


def test_mismatched_weights_are_rejected_by_name(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    write_legacy(named_weights(tiny_model(tokenizer)), tmp_path / "a.pth")
    larger = make_config(replace(SIZES, hidden_size=64, num_layers=3), 400, 2, 0)
    with pytest.raises(ConfigError, match=r"a\.pth: .*layers\.2") as refused:
        load_model(tmp_path / "a.pth", larger)
    assert refused.value.hint


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04"])
def test_file_without_weights_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read weights from .*a\.pth"):
        load_model(tmp_path / "a.pth", make_config(SIZES, 400, 2, 0))


def test_folder_without_weights_is_rejected(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    export_folder(tiny_model(tokenizer), tokenizer, tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot load a model from"):
        load_model(tmp_path / "hf")
    with pytest.raises(ConfigError, match="no model at"):
        load_model(tmp_path / "absent")
