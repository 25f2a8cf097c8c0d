"""Reading GGUF headers, valid and damaged."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.gguf_files import MERGES, TOKENS, llama_tensors, write_gguf
from tinkex.engine.models.gguf.architectures import plan_conversion
from tinkex.engine.models.gguf.reader import read_gguf
from tinkex.engine.models.gguf.tokenizer import tokenizer_files
from tinkex.engine.models.weight_files import UnusableModel

#: How much of a tiny model's file comes before its tensors.
HEADER_BYTES = 5760


@pytest.fixture(scope="module")
def valid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


def error_message(path: Path) -> str:
    with pytest.raises(UnusableModel) as refused:
        read_gguf(path)
    assert "\n" not in refused.value.message
    return refused.value.message


def header(*, version: int = 3, num_tensors: int = 0, num_facts: int = 0) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_facts)


def string(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def test_read_metadata_and_tensors(valid_file: Path) -> None:
    found = read_gguf(valid_file)
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["llama.context_length"] == 128
    assert found.metadata["tokenizer.ggml.tokens"] == list(TOKENS)
    assert found.metadata["tokenizer.ggml.merges"] == list(MERGES)
    for name, tensor in llama_tensors().items():
        stored = found.tensors[name]
        assert (stored.shape, stored.encoding.name) == (tensor.shape, "F32")
        raw = valid_file.read_bytes()[stored.offset : stored.offset + stored.num_bytes]
        assert raw == tensor.tobytes()


def test_every_metadata_type_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "facts.gguf", "llama")
    values: dict[str, tuple[str, Any]] = {
        "a": ("uint8", 200),
        "b": ("int8", -3),
        "c": ("uint16", 60000),
        "d": ("int16", -300),
        "e": ("uint32", 2**31),
        "f": ("int32", -5),
        "g": ("uint64", 2**40),
        "h": ("int64", -(2**40)),
        "i": ("float32", 0.5),
        "j": ("float64", 0.1),
        "k": ("bool", True),
        "l": ("string", "ключ"),
        "m": ("array", [1, 2, 3]),
        "n": ("array", ["x", "yy"]),
        "o": ("array", [[1, 2], [3]]),
    }
    for name, (kind, value) in values.items():
        getattr(writer, f"add_{kind}")(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "facts.gguf").metadata
    assert {name: found[name] for name in values} == {n: value for n, (_, value) in values.items()}


def test_version_2_is_supported(valid_file: Path, tmp_path: Path) -> None:
    content = bytearray(valid_file.read_bytes())
    content[4] = 2
    (tmp_path / "old.gguf").write_bytes(content)
    assert read_gguf(tmp_path / "old.gguf").tensors == read_gguf(valid_file).tensors


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is truncated or damaged"),
        (b"PK\x03\x04" + bytes(40), "is not a GGUF file"),
        (header(version=1), "is a version 1 GGUF file; little-endian versions 2 and 3"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "is a big-endian GGUF"),
        (header(num_facts=1 << 60), "is truncated or damaged"),
        (header(num_facts=1) + string("a") + struct.pack("<IIQ", 9, 4, 1 << 62), "is truncated"),
        (header(num_facts=1) + string("a") + struct.pack("<IIQ", 9, 77, 4) + bytes(9), "type 77"),
        (header(num_facts=1) + string("a") + struct.pack("<I", 99), "a value of type 99"),
        (header(num_facts=1) + struct.pack("<Q", 1) + b"\xff", "is not UTF-8"),
        (header(num_tensors=1) + string("t") + struct.pack("<I", 9), "has 9 dimensions"),
        (header(num_tensors=1) + string("t") + struct.pack("<I", 0), "has 0 dimensions"),
        (header(num_tensors=1) + string("t") + struct.pack("<IQIQ", 1, 4, 16, 0), "as IQ2_XXS"),
        (header(num_tensors=1) + string("t") + struct.pack("<IQIQ", 1, 4, 2, 0), "cannot store"),
        (
            header(num_tensors=1) + string("t") + struct.pack("<IQIQ", 1, 4, 0, 0),
            "is truncated: it",
        ),
    ],
)
def test_invalid_header_message(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    message = error_message(path)
    assert words in message
    assert str(path) in message


def test_nested_arrays_are_limited(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 9, 1) * 500
    (tmp_path / "deep.gguf").write_bytes(
        header(num_facts=1) + string("a") + struct.pack("<I", 9) + inner
    )
    assert "is damaged" in error_message(tmp_path / "deep.gguf")


def test_split_file_error_explains_merging(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "part.gguf", facts={"split.count": 3})
    with pytest.raises(UnusableModel, match="one of 3 parts") as refused:
        read_gguf(path)
    assert "--merge" in (refused.value.hint or "")


def test_missing_gguf_file_is_reported(tmp_path: Path) -> None:
    assert "No such file" in error_message(tmp_path / "none.gguf")


def test_truncated_file_is_rejected(valid_file: Path, tmp_path: Path) -> None:
    content = valid_file.read_bytes()
    path = tmp_path / "cut.gguf"
    rng = np.random.default_rng(0)
    for length in [*range(64), *rng.integers(64, len(content), 60).tolist(), len(content) - 1]:
        path.write_bytes(content[:length])
        error_message(path)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, HEADER_BYTES - 1), change=st.integers(1, 255))
def test_corrupted_byte_never_causes_a_traceback(
    valid_file: Path, tmp_path: Path, position: int, change: int
) -> None:
    # The tensor data is a sparse hole in the file; only the header is read.
    with valid_file.open("rb") as file:
        content = bytearray(file.read(HEADER_BYTES))
    content[position] ^= change
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)
    os.truncate(path, valid_file.stat().st_size)
    try:
        found = read_gguf(path)
        plan_conversion(found)
        tokenizer_files(found)
    except UnusableModel as error:
        assert str(path) in error.message
