"""Inspection of model folders, valid and unusable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.model_folder_files import (
    CONFIG,
    NUM_PARAMETERS,
    SHAPES,
    safetensors,
    write_folder,
    write_shards,
)
from tinkex.engine.models.model_folder import read_model_config, read_model_folder
from tinkex.engine.models.weight_files import UnusableModel, read_header
from tinkex.errors import ConfigError, RequestErrorCategory


def error_message(folder: Path) -> str:
    with pytest.raises(UnusableModel) as refused:
        read_model_folder(folder)
    assert "\n" not in refused.value.message
    return refused.value.message


# --- properties -------------------------------------------------------------------------------


def test_read_model_folder_properties(tmp_path: Path) -> None:
    found = read_model_folder(write_folder(tmp_path))
    assert (found.path, found.arch, found.model_type) == (tmp_path, "Qwen3ForCausalLM", "qwen3")
    assert (found.max_context_tokens, found.dtype) == (256, "float32")
    assert (found.weights.format, found.weights.num_parameters) == ("safetensors", NUM_PARAMETERS)
    assert not found.has_tokenizer
    assert found.num_bytes("float32") == 4 * NUM_PARAMETERS
    assert found.num_bytes("bfloat16") == 2 * NUM_PARAMETERS


def test_sharded_weights_are_one_model(tmp_path: Path) -> None:
    found = read_model_folder(write_shards(tmp_path))
    assert found.weights.num_parameters == NUM_PARAMETERS
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert found.weights.num_file_bytes == sum(sizes)


def test_memory_depends_on_compute_dtype(tmp_path: Path) -> None:
    found = read_model_folder(
        write_folder(tmp_path, files={"model.safetensors": safetensors(dtype="BF16")})
    )
    assert found.dtype == "bfloat16"
    assert found.num_bytes("float32") == 4 * NUM_PARAMETERS


def test_pickle_size_uses_config_dtype(tmp_path: Path) -> None:
    config = CONFIG | {"torch_dtype": "float16"}
    found = read_model_folder(write_folder(tmp_path, config, {"pytorch_model.bin": bytes(100)}))
    assert (found.weights.format, found.weights.num_parameters) == ("pickle", None)
    assert found.num_bytes("float32") == 200
    assert found.num_bytes("float16") == 100


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_position_embeddings": 4096, "sliding_window": 128}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 77}, "n_ctx": 3}, 77),
        ({"max_position_embeddings": None}, None),
        ({}, None),
    ],
)
def test_context_length_is_found_under_every_key(
    tmp_path: Path, fields: dict[str, Any], tokens: int | None
) -> None:
    config = {"architectures": ["XForCausalLM"], "model_type": "x", **fields}
    assert read_model_folder(write_folder(tmp_path, config)).max_context_tokens == tokens


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.txt"])
def test_tokenizer_is_detected(tmp_path: Path, name: str) -> None:
    (write_folder(tmp_path) / name).write_text("{}")
    assert read_model_folder(tmp_path).has_tokenizer


# --- unusable folders ---------------------------------------------------------------------------


def test_missing_file_and_empty_folders_are_rejected(tmp_path: Path) -> None:
    assert error_message(tmp_path / "none") == f"folder {tmp_path / 'none'} does not exist"
    (tmp_path / "model.bin").write_text("weights")
    assert "is a file" in error_message(tmp_path / "model.bin")
    assert "has no config.json" in error_message(tmp_path)


def test_gguf_error_explains_conversion(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("GGUF")
    for location, words in ((path, f"`tinkex model add NAME {path}`"), (tmp_path, str(path))):
        with pytest.raises(UnusableModel) as refused:
            read_model_folder(location)
        assert words in (refused.value.hint or "")


def test_adapter_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is an adapter" in error_message(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "holds BertForMaskedLM, which is not a causal"),
        ({"is_encoder_decoder": True}, "which is not a causal language model"),
        ({"model_type": ""}, "has no model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized (gptq)"),
        ({"quantization_config": "odd"}, "is quantized (?)"),
    ],
)
def test_unsupported_model_is_rejected(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    assert words in error_message(write_folder(tmp_path, CONFIG | config))


@pytest.mark.parametrize(("text", "words"), [("{", "not valid JSON"), ("[]", "holds a list")])
def test_damaged_config_is_rejected(tmp_path: Path, text: str, words: str) -> None:
    (write_folder(tmp_path) / "config.json").write_text(text)
    assert words in error_message(tmp_path)


def test_missing_weights_message(tmp_path: Path) -> None:
    write_folder(tmp_path, files={"weights.gguf": b"GGUF"})
    message = error_message(tmp_path)
    assert "expected model.safetensors or" in message
    assert ".gguf files are not supported" in message


def test_truncated_weights_message(tmp_path: Path) -> None:
    whole = safetensors()
    write_folder(tmp_path, files={"model.safetensors": whole[:-1]})
    size = 4 * NUM_PARAMETERS
    expected = f"it has {size - 1:,} bytes of tensors, but its header describes {size:,}"
    assert expected in error_message(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"\xff" * 20, b"12345678{}", b"\2" + bytes(7) + b"[]"]
)
def test_invalid_weights_are_rejected(tmp_path: Path, content: bytes) -> None:
    write_folder(tmp_path, files={"model.safetensors": content})
    with pytest.raises(UnusableModel):
        read_model_folder(tmp_path)


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "F8_E4M3"}, "has the dtype 'F8_E4M3', which is not one of F64, F32"),
        ({"dtype": "MADE_UP", "shape": "abc"}, "has the dtype 'MADE_UP'"),
        ({"dtype": None}, "has the dtype None"),
        ({"dtype": ["F32"]}, "has the dtype ['F32']"),
        ({"shape": [2, -3]}, "has the shape [2, -3], which is not a list of sizes"),
        ({"shape": [2, 3.0]}, "has the shape [2, 3.0]"),
        ({"shape": [True, 6]}, "has the shape [True, 6]"),
        ({"shape": None}, "has the shape None"),
        ({"shape": [2, 4]}, "has 24 bytes, but F32 of shape [2, 4] needs 32"),
        ({"data_offsets": [0]}, "has data_offsets [0], expected two positions"),
        ({"data_offsets": [24, 0]}, "has -24 bytes, but F32"),
        ({"data_offsets": [0, 1e400]}, "has data_offsets [0, inf]"),
        ({"data_offsets": [8, 32]}, "begins at byte 8, expected 0"),
    ],
)
def test_damaged_entry_names_file_and_tensor(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    text = json.dumps({"model.norm.weight": {**GOOD, **change}}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(24)
    write_folder(tmp_path, files={"model.safetensors": content})
    message = error_message(tmp_path)
    assert message.startswith(
        f"{tmp_path / 'model.safetensors'} cannot be read: tensor 'model.norm.w"
    )
    assert words in message


@pytest.mark.parametrize("entry", [None, [], "F32", 5, {}])
def test_non_object_entry_names_tensor(tmp_path: Path, entry: Any) -> None:
    text = json.dumps({"model.norm.weight": entry}).encode()
    write_folder(tmp_path, files={"model.safetensors": len(text).to_bytes(8, "little") + text})
    assert "tensor 'model.norm.weight' has" in error_message(tmp_path)


@pytest.mark.parametrize("metadata", [{"format": 5}, [], "pt"])
def test_invalid_header_metadata_is_rejected(tmp_path: Path, metadata: Any) -> None:
    text = json.dumps({"__metadata__": metadata, "model.norm.weight": GOOD}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(24)
    write_folder(tmp_path, files={"model.safetensors": content})
    assert "its __metadata__ is not a mapping of strings" in error_message(tmp_path)


def test_deeply_nested_header_is_rejected(tmp_path: Path) -> None:
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    write_folder(tmp_path, files={"model.safetensors": len(text).to_bytes(8, "little") + text})
    assert "is not valid JSON" in error_message(tmp_path)


def test_git_lfs_pointer_message(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
    write_folder(tmp_path, files={"model.safetensors": pointer})
    with pytest.raises(UnusableModel, match="Git LFS pointer") as refused:
        read_model_folder(tmp_path)
    assert "git lfs pull" in (refused.value.hint or "")


def test_missing_file_and_tensor_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(safetensors({"other": (1,)}))
    message = error_message(tmp_path)
    assert "b.safetensors lacks 1 tensors, for example 'model.norm.weight'" in message
    (tmp_path / "b.safetensors").unlink()
    assert "b.safetensors is missing, but model.safetensors.index.json" in error_message(tmp_path)


def test_index_without_weight_map_is_rejected(tmp_path: Path) -> None:
    write_folder(tmp_path, files={"model.safetensors.index.json": b"{}"})
    assert "has no weight_map" in error_message(tmp_path)


def test_truncated_pickle_is_rejected(tmp_path: Path) -> None:
    write_folder(tmp_path, files={"pytorch_model.bin": b"PK\x03\x04 and no end"})
    assert "pytorch_model.bin is truncated" in error_message(tmp_path)


def test_unusable_model_is_a_config_and_server_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_model_config(tmp_path)
    assert refused.value.category is RequestErrorCategory.Server


@settings(max_examples=200)
@given(st.data())
def test_damaged_header_is_always_reported(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    whole = bytearray(safetensors())
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(whole))
    try:
        found = read_header(path)
    except UnusableModel as error:
        assert str(path) in error.message
    else:
        assert len(found) == len(SHAPES)


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists), st.text())
def test_any_header_is_read_or_rejected(value: Any, name: str) -> None:
    """JSON that is not a header must not cause a traceback."""
    import tempfile

    text = json.dumps({name: value}).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        if name == "__metadata__" and value is None:
            assert read_header(path) == {}
        else:
            with pytest.raises(UnusableModel):
                read_header(path)
