"""Dequantization is bit-identical to that of the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.engine.models.gguf.quantization import ENCODINGS, encoding_name

KINDS = st.sampled_from(sorted(ENCODINGS))


@pytest.mark.parametrize("kind", sorted(ENCODINGS), ids=lambda kind: ENCODINGS[kind].name)
def test_encoding_names_and_sizes_match_gguf(kind: int) -> None:
    encoding, theirs = ENCODINGS[kind], gguf.GGMLQuantizationType(kind)
    assert encoding.name == theirs.name
    assert (encoding.block_size, encoding.block_bytes) == gguf.GGML_QUANT_SIZES[theirs]


def test_all_documented_encodings_are_supported() -> None:
    names = {encoding.name for encoding in ENCODINGS.values()}
    assert names >= {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"}


@settings(deadline=None)
@given(kind=KINDS, num_blocks=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_dequantization_matches_gguf_bit_for_bit(kind: int, num_blocks: int, seed: int) -> None:
    encoding = ENCODINGS[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_blocks, encoding.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours = np.ascontiguousarray(encoding.decode(raw))
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
    theirs = theirs.astype(np.float32).reshape(ours.shape)
    assert ours.dtype == np.float32
    assert ours.shape == (num_blocks, encoding.block_size)
    is_number = ~np.isnan(theirs)
    assert np.array_equal(is_number, ~np.isnan(ours))
    assert np.array_equal(ours.view(np.uint32)[is_number], theirs.view(np.uint32)[is_number])


def test_q4_block_by_hand() -> None:
    """The layout of a block: scale, minimum, low nibbles, high nibbles."""
    scale, minimum = np.float16(0.5), np.float16(-3.0)
    packed = bytes((number + 1) % 16 << 4 | number for number in range(16))
    raw = np.frombuffer(scale.tobytes() + minimum.tobytes() + packed, np.uint8)
    lower = [0.5 * number - 3 for number in range(16)]
    upper = [0.5 * ((number + 1) % 16) - 3 for number in range(16)]
    assert ENCODINGS[3].decode(raw[None]).tolist() == [lower + upper]


@pytest.mark.parametrize("kind", [kind for kind, each in ENCODINGS.items() if each.is_plain])
def test_plain_encodings_keep_safetensors_dtype(kind: int) -> None:
    assert ENCODINGS[kind].dtype == ENCODINGS[kind].name


def test_quantized_encodings_become_float32() -> None:
    packed = [each for each in ENCODINGS.values() if not each.is_plain]
    assert {each.dtype for each in packed} == {"F32"}


def test_unsupported_encoding_has_a_name() -> None:
    assert encoding_name(gguf.GGMLQuantizationType.IQ2_XXS) == "IQ2_XXS"
    assert encoding_name(999) == "type 999"
    for theirs in gguf.GGMLQuantizationType:
        if theirs not in ENCODINGS:
            assert encoding_name(theirs) in (theirs.name, f"type {int(theirs)}")
