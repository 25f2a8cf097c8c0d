"""Protobuf codec of sampling results, including invalid messages."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tinkex.types import PromptAltTokens, SampledSequence, SampleResponse, TensorData, TopkLogprobs
from tinkex.wire.proto import WireError, decode_sample_response, encode_sample_response
from tinkex.wire.proto.protobuf import encode_varint
from tinkex.wire.proto.sampling import topk_from_rows


def field(number: int, payload: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(payload)) + payload


def topk(ids: list[int], logprobs: list[float], k: int, length: int) -> bytes:
    return (
        field(1, struct.pack(f"<{len(ids)}i", *ids))
        + field(2, struct.pack(f"<{len(logprobs)}f", *logprobs))
        + b"\x18"
        + encode_varint(k)
        + b"\x20"
        + encode_varint(length)
    )


def test_bytes_match_the_official_package() -> None:
    matrices = TopkLogprobs(np.array([[7]], np.int32), np.array([[-0.5]], np.float32))
    sequence = SampledSequence(
        "length", "id", np.array([7], np.int32), np.array([-0.5], np.float32), matrices
    )
    response = SampleResponse([sequence], np.array([1], np.float32), prompt_cache_hit_tokens=3)
    assert encode_sample_response(response).hex() == (
        "0a2008011204070000001a04000000bf22100a04070000001204000000bf1801200112040000803f2003"
    )


def test_empty_messages_decode_to_defaults() -> None:
    assert decode_sample_response(b"") == SampleResponse([])
    (sequence,) = decode_sample_response(field(1, b"")).sequences
    assert sequence.stop_reason == "stop"
    assert sequence.tokens == []
    assert sequence.logprobs is None
    assert sequence.sequence_id == ""


def test_empty_logprobs_mean_none() -> None:
    response = decode_sample_response(field(1, field(3, b"")) + field(2, b""))
    assert response.prompt_logprobs_np is None
    assert response.sequences[0].logprobs_np is None


def test_arrays_are_writable() -> None:
    body = field(1, field(2, struct.pack("<2i", 1, 2)) + field(3, struct.pack("<2f", 3, 4)))
    (sequence,) = decode_sample_response(b"\x78\x01" + body).sequences
    for array in (sequence.tokens_np, sequence.logprobs_np):
        assert array is not None
        assert array.flags.aligned
        array[0] = 9
    assert sequence.tokens == [9, 2]
    assert sequence.logprobs == [9.0, 4.0]


def test_prompt_nan_becomes_none() -> None:
    body = field(2, struct.pack("<2f", float("nan"), -1))
    assert decode_sample_response(body).prompt_logprobs == [None, -1.0]


def test_empty_matrices_mean_none() -> None:
    response = decode_sample_response(field(3, topk([], [], 0, 5)) + field(1, field(4, b"")))
    assert response.topk_prompt_logprobs_np is None
    assert response.sequences[0].topk_logprobs_np is None


def test_bfloat16_tensors_are_decoded() -> None:
    body = field(5, field(1, b"\x80\x3f\x00\xc0") + b"\x18\x04" + field(4, b"\x01\x02"))
    tensor = decode_sample_response(body).target_prompt_logprobs
    assert tensor is not None
    assert tensor.tolist() == [[1.0, -2.0]]


def test_lists_and_arrays_encode_equally() -> None:
    rows: list[list[tuple[int, float]] | None] = [None, [(5, -0.5), (6, -1.5)], [(7, -0.25)]]
    from_lists = SampleResponse(
        [
            SampledSequence(
                "stop",
                "",
                _tokens_list=[1, 2],
                _logprobs_list=[-1.0, -2.0],
                _topk_logprobs_list=rows,
            )
        ],
        _prompt_logprobs_list=[None, -3.0],
        _topk_prompt_logprobs_list=rows,
    )
    response = decode_sample_response(encode_sample_response(from_lists))
    assert response == from_lists
    assert response.topk_prompt_logprobs == rows
    assert response.prompt_logprobs == [None, -3.0]


def test_rows_become_padded_matrices() -> None:
    matrices = topk_from_rows([[(5, -0.5)], None, []])
    assert matrices.token_ids.tolist() == [[5], [0], [0]]
    assert matrices.logprobs.tolist() == [[-0.5], [-99999.0], [-99999.0]]


def test_other_number_types_are_converted() -> None:
    sequence = SampledSequence("stop", "", np.array([1, 2]), np.array([0.5, 0.25]))
    (read,) = decode_sample_response(encode_sample_response(SampleResponse([sequence]))).sequences
    assert (read.tokens, read.logprobs) == ([1, 2], [0.5, 0.25])


def test_prompt_alternatives_are_two_tensors() -> None:
    alternatives = PromptAltTokens(
        TensorData([1, 2], "int64", [2, 1]), TensorData([0.5, 0.25], "float32", [2, 1])
    )
    response = SampleResponse([], prompt_alt_tokens=alternatives)
    assert (
        decode_sample_response(encode_sample_response(response)).prompt_alt_tokens == alternatives
    )


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (field(1, b"\x08\x02"), "stop_reason 2 is unknown"),
        (field(1, b"\x08" + encode_varint(-1)), "stop_reason -1 is unknown"),
        (field(1, field(2, b"abc")), "tokens has 3 bytes"),
        (field(1, field(3, b"abcde")), "logprobs has 5 bytes"),
        (field(2, b"a"), "logprobs has 1 bytes"),
        (field(3, topk([1, 2], [0.5, 0.5], 2, 2)), "2 numbers for 2 rows of 2"),
        (field(3, topk([1, 2], [0.5], 2, 1)), "1 numbers for 1 rows of 2"),
        (field(3, topk([1], [0.5], 0xFFFF_FFFF, 0xFFFF_FFFF)), "1 numbers for"),
        (field(3, field(1, b"abc") + b"\x18\x01\x20\x01"), "topk_logprobs has 3 bytes"),
        (field(5, field(1, b"abcd")), "target_prompt_logprobs has the unknown dtype 0"),
        (field(6, b""), "prompt_alt_tokens.tokens has the unknown dtype 0"),
    ],
)
def test_invalid_response_is_refused(body: bytes, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        decode_sample_response(body)
