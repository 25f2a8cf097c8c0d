"""Conversion of GGUF files to model folders: exact weights, matching config, atomic output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.gguf_files import HEADS, HIDDEN, KV_HEADS, llama_tensors, write_gguf
from tinkex.engine.models.gguf import convert
from tinkex.engine.models.gguf.architectures import llama3_factors
from tinkex.engine.models.gguf.convert import convert_gguf, row_order
from tinkex.engine.models.model_folder import read_model_folder
from tinkex.engine.models.weight_files import UnusableModel

Kind = gguf.GGMLQuantizationType


def error_message(source: Path, target: Path) -> str:
    with pytest.raises(UnusableModel) as refused:
        convert_gguf(source, target)
    assert not target.exists()
    assert not list(target.parent.glob(".partial-*"))
    return refused.value.message


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def interleaved(rows: Any, num_heads: int) -> Any:
    """Query and key rows in the order of llama.cpp."""
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


# --- weights ------------------------------------------------------------------------------------


def test_tensors_are_renamed_with_same_values(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    folder = convert_gguf(source, tmp_path / "out" / "model")
    assert folder == read_model_folder(tmp_path / "out" / "model")
    assert (folder.arch, folder.dtype, folder.has_tokenizer) == (
        "LlamaForCausalLM",
        "float32",
        True,
    )
    found, given = load_file(folder.path / "model.safetensors"), llama_tensors()
    assert len(found) == len(given)
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    }.items():
        assert np.array_equal(found[ours], given[theirs])


@pytest.mark.parametrize(("part", "ours", "heads"), [("q", "q", HEADS), ("k", "k", KV_HEADS)])
def test_query_and_key_rows_are_deinterleaved(
    tmp_path: Path, part: str, ours: str, heads: int
) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "model")
    found = load_file(folder.path / "model.safetensors")
    back = found[f"model.layers.0.self_attn.{ours}_proj.weight"]
    assert np.array_equal(interleaved(back, heads), llama_tensors()[f"blk.0.attn_{part}.weight"])


def test_row_order_inverts_gguf_permutation() -> None:
    rows = np.arange(24)
    assert np.array_equal(interleaved(rows, 3)[row_order(24, 3)], rows)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantized_rows_are_dequantized(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small chunks, so that a tensor needs several.
    monkeypatch.setattr(convert, "_CHUNK_NUMBERS", 700)
    names = ("blk.0.attn_q.weight", "blk.0.ffn_up.weight", "token_embd.weight")
    source = write_gguf(tmp_path / "model.gguf", kinds=dict.fromkeys(names, kind))
    found = load_file(convert_gguf(source, tmp_path / "model").path / "model.safetensors")
    given = {
        name: gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
        for name, tensor in llama_tensors().items()
        if name in names
    }
    assert np.array_equal(found["model.embed_tokens.weight"], given["token_embd.weight"])
    assert np.array_equal(found["model.layers.0.mlp.up_proj.weight"], given["blk.0.ffn_up.weight"])
    queries = found["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(interleaved(queries, HEADS), given["blk.0.attn_q.weight"])


def test_half_precision_is_copied(tmp_path: Path) -> None:
    tensors: dict[str, Any] = llama_tensors()
    kinds = {name: Kind.BF16 for name in tensors if "norm" not in name}
    kinds["blk.0.ffn_up.weight"] = Kind.F16
    source = write_gguf(tmp_path / "model.gguf", tensors, kinds=kinds)
    folder = convert_gguf(source, tmp_path / "model")
    assert folder.dtype == "bfloat16"
    assert config_of(folder.path)["dtype"] == "bfloat16"
    assert set(folder.weights.dtypes) == {"BF16", "F16", "F32"}


def test_non_finite_values_are_rejected(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["blk.1.ffn_up.weight"][3, 5] = np.nan
    message = error_message(
        write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "out" / "model"
    )
    assert "'blk.1.ffn_up.weight'" in message
    assert "non-finite" in message


# --- config.json --------------------------------------------------------------------------------


def test_config_matches_metadata(tmp_path: Path) -> None:
    config = config_of(convert_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "model").path)
    assert (config["hidden_size"], config["head_dim"]) == (HIDDEN, HIDDEN // HEADS)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    # Not 9.999999747378752e-06, which is the same float32.
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert (config["tie_word_embeddings"], config["max_position_embeddings"]) == (True, 128)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert "rope_scaling" not in config


def test_untied_lm_head(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    folder = convert_gguf(write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "model").path
    assert config_of(folder)["tie_word_embeddings"] is False
    found = load_file(folder / "model.safetensors")
    assert np.array_equal(found["lm_head.weight"], tensors["output.weight"])


def test_rope_scaling(tmp_path: Path) -> None:
    facts: dict[str, Any] = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    folder = convert_gguf(write_gguf(tmp_path / "yarn.gguf", facts=facts), tmp_path / "yarn").path
    assert config_of(folder)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    facts = {"llama.rope.scaling.type": "longrope"}
    message = error_message(
        write_gguf(tmp_path / "long.gguf", facts=facts), tmp_path / "out" / "long"
    )
    assert "'longrope'" in message


def test_llama3_rope_factors(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["rope_freqs.weight"] = llama3_factors(32.0, 1e5, HIDDEN // HEADS).astype(np.float32)
    folder = convert_gguf(write_gguf(tmp_path / "three.gguf", tensors), tmp_path / "three").path
    scaling = config_of(folder)["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)
    tensors["rope_freqs.weight"][20] += 0.5
    message = error_message(
        write_gguf(tmp_path / "other.gguf", tensors), tmp_path / "out" / "other"
    )
    assert "not a supported RoPE scaling" in message


# --- invalid files ------------------------------------------------------------------------------


def invalid_files(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Files that cannot be converted, with the expected error."""
    yield write_gguf(tmp_path / "a.gguf", arch="falcon"), "holds a 'falcon' model"
    tensors = llama_tensors()
    del tensors["blk.1.attn_v.weight"]
    yield write_gguf(tmp_path / "b.gguf", tensors), "lacks the tensor 'blk.1.attn_v.weight'"
    tensors = llama_tensors() | {"blk.0.ffn_gate_exps.weight": np.zeros((4, 32), np.float32)}
    yield write_gguf(tmp_path / "c.gguf", tensors), "for example 'blk.0.ffn_gate_exps.weight'"
    facts: dict[str, Any] = {"llama.attention.head_count_kv": 4}
    yield write_gguf(tmp_path / "d.gguf", facts=facts), "has the shape (128, 256), expected"
    facts = {"llama.block_count": None}
    yield write_gguf(tmp_path / "e.gguf", facts=facts), "lacks llama.block_count"
    facts = {"llama.rope.dimension_count": 32}
    yield write_gguf(tmp_path / "f.gguf", facts=facts), "rope.dimension_count of 32"
    facts = {"llama.context_length": "long"}
    yield write_gguf(tmp_path / "g.gguf", facts=facts), "has 'long' as llama.context_length"


def test_failed_conversion_leaves_no_folder(tmp_path: Path) -> None:
    for source, words in invalid_files(tmp_path):
        assert words in error_message(source, tmp_path / "out" / "model")


def test_full_disk_is_reported_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_SPARE_BYTES", 1 << 60)
    message = error_message(write_gguf(tmp_path / "model.gguf"), tmp_path / "out" / "model")
    assert "GB free, but the converted model needs" in message


def test_interrupted_conversion_keeps_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    convert_gguf(write_gguf(tmp_path / "one.gguf"), target)
    before = (target / "model.safetensors").read_bytes()

    def stop(done: int, total: int) -> None:
        if 2 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(
            write_gguf(tmp_path / "two.gguf", llama_tensors(seed=1)), target, on_progress=stop
        )
    assert (target / "model.safetensors").read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["model"]


# --- repetition ---------------------------------------------------------------------------------


def test_same_file_is_converted_once(tmp_path: Path) -> None:
    target = tmp_path / "model"
    progress: list[tuple[int, int]] = []
    for seed, is_converted in ((0, True), (0, False), (1, True)):
        source = write_gguf(tmp_path / "model.gguf", llama_tensors(seed))
        convert_gguf(source, target, on_progress=lambda done, total: progress.append((done, total)))
        assert bool(progress) == is_converted
        progress.clear()


def test_damaged_folder_is_converted_again(tmp_path: Path) -> None:
    target, source = tmp_path / "model", write_gguf(tmp_path / "model.gguf")
    progress: list[tuple[int, int]] = []
    convert_gguf(source, target)
    (target / "model.safetensors").write_bytes(b"")
    convert_gguf(source, target, on_progress=lambda done, total: progress.append((done, total)))
    assert progress[-1][0] == progress[-1][1] > progress[0][0]
    assert read_model_folder(target).weights.num_parameters


def test_written_weights_are_verified(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")

    def damage(done: int, total: int) -> None:
        """Simulate a bad disk: flip a bit after writing."""
        if done < total:
            return
        (path,) = tmp_path.rglob("model.safetensors")
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))

    with pytest.raises(UnusableModel, match="do not match the file"):
        convert_gguf(source, tmp_path / "out" / "model", on_progress=damage)
    assert not (tmp_path / "out" / "model").exists()


def test_origin_file_records_weights(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    folder = convert_gguf(source, tmp_path / "model").path
    weights = folder / "model.safetensors"
    origin = json.loads((folder / "origin.json").read_text())
    assert origin["weights_sha256"] == convert.file_sha256(weights)
    assert origin["weights_bytes"] == weights.stat().st_size
    # A valid file, but not the converted one.
    save_file({"model.norm.weight": np.ones(HIDDEN, np.float32)}, weights)
    assert convert.find_converted(folder, origin["sha256"]) is None
    convert_gguf(source, folder)
    assert convert.file_sha256(weights) == origin["weights_sha256"]


def test_extra_files_are_added(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    convert_gguf(source, tmp_path / "model", files={"LICENSE": b"words"})
    assert (tmp_path / "model" / "LICENSE").read_bytes() == b"words"
