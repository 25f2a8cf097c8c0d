"""The model registry: loading, eviction, changing model lists and unusable folders."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.tiny_model_folders import END, END_TOKEN, save_tiny, save_tokenizer
from tests.support.tiny_models import VOCAB_SIZE, tiny_qwen3
from tinkex.engine.config import EngineConfig
from tinkex.engine.models.loading import LoadedModel, compute_device, load_base_model
from tinkex.engine.models.model_folder import read_model_folder
from tinkex.engine.models.registry import ModelRegistry
from tinkex.engine.models.weight_files import UnusableModel
from tinkex.errors import ConfigError, InvalidInput
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.lora_training import SegmentedLora
from tinkex.nn.packed_attention import PackedAttention

TOKENS = [5, 6, 7, 8, 9, 10]


def registry_of(*folders: Path, **settings: Any) -> ModelRegistry:
    return ModelRegistry({folder.name: str(folder) for folder in folders}, EngineConfig(**settings))


@torch.no_grad()
def logits_of(model: LoadedModel) -> torch.Tensor:
    """A hosted model's logits of a few tokens."""
    rows = ForwardContext(SegmentedLora([]), PackedAttention([len(TOKENS)]))
    hidden = model.hosted_model.hidden_states(torch.tensor(TOKENS), torch.arange(len(TOKENS)), rows)
    return model.hosted_model.lm_head.logits(hidden, rows.lora)[0].float()


@torch.no_grad()
def expected_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """The logits of the same model in transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    found: torch.Tensor = model(torch.tensor([TOKENS])).logits[0].float()
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Saves tiny models of the same size."""
    return lambda name, **fields: save_tiny(tmp_path / name, **fields)


# --- loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_model_matches_transformers(folder: Path, dtype: str) -> None:
    model = registry_of(folder, dtype=dtype).get(folder.name)
    wanted = getattr(torch, dtype)
    assert model.hosted_model.dtype == wanted
    close = {"rtol": 0, "atol": 1e-5 if dtype == "float32" else 2e-2}
    torch.testing.assert_close(logits_of(model), expected_logits(folder, wanted), **close)


def test_describing_loads_no_model_and_get_loads_it_once(folder: Path) -> None:
    registry = registry_of(folder)
    (base,) = registry.base_models()
    assert (base.name, base.arch, base.max_context_tokens) == ("tiny", "Qwen3ForCausalLM", 512)
    assert (base.tokenizer_id, base.tokenizer_folder) == (None, str(folder))
    assert registry.loaded_names == ()
    model = registry.get("tiny")
    assert registry.loaded_names == ("tiny",)
    assert registry.get("tiny") is model
    assert model.max_context_tokens == 512
    # Besides the weights there are a few computed buffers and the padding of panels.
    assert 0 <= model.num_bytes - read_model_folder(folder).num_bytes("float32") < 3000


def test_describing_models_does_not_import_their_classes(folder: Path) -> None:
    # They take seconds to import, and a worker starts without a loaded model.
    probe = (
        "import sys; from tinkex.engine.torch_engine import TorchEngine; "
        "[model] = TorchEngine({'base': sys.argv[1]}).base_models(); "
        "print(model.name, 'transformers.modeling_utils' in sys.modules)"
    )
    command = [sys.executable, "-c", probe, str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "base False\n"


def test_weights_are_independent_of_the_file(saved: Callable[..., Path]) -> None:
    folder = saved("tiny")
    model = registry_of(folder).get("tiny")
    before = logits_of(model)
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(logits_of(model), before)


def test_eos_tokens_come_from_generation_config_and_tokenizer(saved: Callable[..., Path]) -> None:
    folder = saved("tiny")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = registry_of(folder).get("tiny")
    assert model.eos_tokens == {7, 9, END_TOKEN}
    assert model.tokenizer is not None
    assert END in model.tokenizer.decode([10, END_TOKEN, 11])


def test_model_without_tokenizer(tmp_path: Path) -> None:
    tiny_qwen3(eos_token_id=4).save_pretrained(tmp_path / "bare")
    registry = registry_of(tmp_path / "bare")
    model = registry.get("bare")
    assert model.tokenizer is None
    assert model.eos_tokens == {4}
    assert registry.base_models()[0].tokenizer_folder is None


def test_damaged_tokenizer_is_ignored_with_warning(
    saved: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved("tiny")
    (folder / "tokenizer.json").write_text("{")
    model = registry_of(folder).get("tiny")
    assert model.tokenizer is None
    assert "base model 'tiny' does not support stop strings" in caplog.text


def test_load_shards_and_pickles(tmp_path: Path, folder: Path) -> None:
    sharded, pickled = tmp_path / "sharded", tmp_path / "pickled"
    tiny = tiny_qwen3()
    tiny.save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    shutil.copytree(folder, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    registry = registry_of(sharded, pickled)
    expected = expected_logits(folder, torch.float32)
    for name in ("sharded", "pickled"):
        torch.testing.assert_close(logits_of(registry.get(name)), expected, rtol=0, atol=1e-5)


def test_pickle_with_code_is_rejected(saved: Callable[..., Path], tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    folder = saved("tiny")
    (folder / "model.safetensors").unlink()
    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    registry = registry_of(folder)
    with pytest.raises(UnusableModel, match="holds more than tensors; code in pickles"):
        registry.get("tiny")
    assert not (tmp_path / "ran").exists()


def test_loading_is_only_logged(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    registry_of(folder).get("tiny")
    assert f"loading base model 'tiny' from {folder}" in caplog.text
    assert "base model 'tiny' is ready" in caplog.text
    out, err = capfd.readouterr()
    assert "Loading" not in out + err
    assert "%|" not in out + err


def test_loading_progress_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.engine.models.loading.LOG_INTERVAL_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "tinkex")
    registry_of(folder).get("tiny")
    assert "base model 'tiny': 100% read" in caplog.text
    assert "base model 'tiny': 100% copied to memory" in caplog.text


# --- memory -------------------------------------------------------------------------------------


def test_lru_model_is_evicted_and_reloads_identically(
    saved: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    folders = [saved(name, seed=seed) for seed, name in enumerate("abc")]
    size = read_model_folder(folders[0]).num_bytes("float32")
    registry = registry_of(*folders, memory_bytes=2 * size + 9000)
    first = logits_of(registry.get("a"))
    gone = weakref.ref(registry.get("a").hosted_model.model)
    second = logits_of(registry.get("b"))
    assert not torch.equal(first, second)
    registry.get("a")
    registry.get("c")
    assert registry.loaded_names == ("a", "c")
    assert "evicting base model 'b' to load 'c'" in caplog.text
    assert torch.equal(logits_of(registry.get("b")), second)
    assert registry.loaded_names == ("c", "b")
    gc.collect()
    assert gone() is None, "an evicted model is still in memory"
    assert torch.equal(logits_of(registry.get("a")), first)


def test_busy_model_is_not_evicted_and_callback_runs_before_eviction(
    saved: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folders = [saved(name) for name in "abc"]
    size = read_model_folder(folders[0]).num_bytes("float32")
    busy, evicted = {"a"}, []
    registry = ModelRegistry(
        {folder.name: str(folder) for folder in folders},
        EngineConfig(memory_bytes=2 * size + 9000),
        busy.__contains__,
        evicted.append,
    )
    registry.get("a")
    registry.get("b")
    registry.get("c")
    assert (evicted, registry.loaded_names) == (["b"], ("a", "c"))
    assert "more than memory_bytes" not in caplog.text
    busy.add("c")
    registry.get("b")
    assert registry.loaded_names == ("a", "c", "b")
    assert "more than memory_bytes" in caplog.text


def test_model_larger_than_budget_is_rejected(folder: Path) -> None:
    size = read_model_folder(folder).num_bytes("float32")
    with pytest.raises(ConfigError, match=f"needs {size:,} bytes as float32.*allows {size - 1:,}"):
        registry_of(folder, memory_bytes=size - 1)
    registry_of(folder, memory_bytes=size)
    registry_of(folder, memory_bytes=size - 1, dtype="bfloat16")


def test_no_eviction_without_budget(saved: Callable[..., Path]) -> None:
    registry = registry_of(saved("a"), saved("b"))
    registry.get("a")
    registry.get("b")
    assert registry.loaded_names == ("a", "b")
    registry.close()
    assert registry.loaded_names == ()


# --- changing model list ------------------------------------------------------------------------


def test_add_model_while_others_are_loaded(saved: Callable[..., Path]) -> None:
    first, second = saved("a"), saved("b")
    registry = registry_of(first)
    model = registry.get("a")
    registry.replace_sources({"a": str(first), "b": str(second)})
    assert [base.name for base in registry.base_models()] == ["a", "b"]
    assert registry.get("a") is model
    assert registry.get("b").name == "b"


def test_removed_model_is_unloaded_unless_in_use(saved: Callable[..., Path]) -> None:
    folders = [saved(name) for name in "abc"]
    registry = registry_of(*folders)
    used = registry.get("a")
    registry.get("b")
    registry.replace_sources({"c": str(folders[2])}, in_use={"a"})
    assert [model.name for model in registry.base_models()] == ["c"]
    assert registry.loaded_names == ("a",)
    assert registry.get("a") is used
    # An existing run that was not in memory can continue too.
    assert registry.get("b").name == "b"


def test_moved_model_is_reloaded(saved: Callable[..., Path]) -> None:
    first, second = saved("a"), saved("b", seed=7)
    registry = registry_of(first)
    before = logits_of(registry.get("a"))
    registry.replace_sources({"a": str(second)}, in_use={"a"})
    assert torch.equal(logits_of(registry.get("a")), before)
    registry.replace_sources({"a": str(second)})
    assert not torch.equal(logits_of(registry.get("a")), before)


def test_unusable_new_model_is_skipped(
    saved: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved("a")
    registry = registry_of(folder)
    registry.replace_sources({"a": str(folder), "none": str(tmp_path / "none")})
    assert [model.name for model in registry.base_models()] == ["a"]
    assert "base model 'none': folder" in caplog.text


# --- unusable models ----------------------------------------------------------------------------


def test_unknown_model_message(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="base model 'x' cannot be served here; available: tiny"):
        registry_of(folder).get("x")
    with pytest.raises(InvalidInput, match="tinkex model add x"):
        registry_of().get("x")


def test_unusable_folder_is_rejected_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base model 'none': folder"):
        registry_of(tmp_path / "none")


def test_unknown_architecture_is_rejected_without_remote_code(saved: Callable[..., Path]) -> None:
    folder = saved("tiny")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="'strange' model, which transformers cannot run"):
        registry_of(folder)
    assert not (folder / "ran").exists()


def test_non_causal_model_is_rejected(saved: Callable[..., Path]) -> None:
    folder = saved("tiny")
    config = {"model_type": "clip", "architectures": None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'clip' model, which is not a causal language model"):
        registry_of(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "1 tensors are missing"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            "1 tensors have the wrong shape",
        ),
    ],
)
def test_missing_weights_are_rejected(
    saved: Callable[..., Path], change: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    path = saved("tiny") / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnusableModel, match="base model 'tiny' cannot be loaded") as refused:
        registry_of(path.parent).get("tiny")
    assert words in refused.value.message
    assert "model.norm.weight" in refused.value.message


def test_deleted_folder_is_a_server_error(saved: Callable[..., Path]) -> None:
    folder = saved("tiny")
    registry = registry_of(folder)
    shutil.rmtree(folder)
    with pytest.raises(UnusableModel, match="base model 'tiny' cannot be loaded"):
        registry.get("tiny")
    save_tiny(folder)
    assert registry.get("tiny").hosted_model.vocab_size == VOCAB_SIZE


def test_context_length_of_special_families(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=60, n_positions=48, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    (model,) = registry_of(tmp_path / "gpt2").base_models()
    assert (model.max_context_tokens, model.arch) == (48, "GPT2LMHeadModel")


# --- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda:99", "meat", "cuda:x"])
def test_unavailable_device_is_rejected(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{device}', which cannot be used"):
        registry_of(folder, device=device)


def test_auto_device_prefers_gpu() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert compute_device(EngineConfig()).type == expected
    assert compute_device(EngineConfig(device="cpu")).type == "cpu"


def test_loading_does_not_depend_on_rng_state(folder: Path) -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    one = load_base_model("tiny", read_model_folder(folder), EngineConfig(), 512)
    torch.manual_seed(1)
    two = load_base_model("tiny", read_model_folder(folder), EngineConfig(), 512)
    assert torch.equal(logits_of(one), logits_of(two))


def test_tokenizer_may_be_smaller_than_vocabulary(tmp_path: Path) -> None:
    tiny_qwen3(vocab_size=300).save_pretrained(tmp_path / "wide")
    save_tokenizer(tmp_path / "wide", 100)
    assert registry_of(tmp_path / "wide").get("wide").hosted_model.vocab_size == 300
