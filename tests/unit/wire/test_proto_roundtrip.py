"""Round trips of protobuf messages; damaged ones raise only WireError."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkex.errors import InvalidInput
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ImageChunk,
    ModelInput,
    PromptAltTokens,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)
from tinkex.wire.proto import (
    WireError,
    decode_forward_backward_output,
    decode_forward_backward_request,
    decode_sample_response,
    encode_forward_backward_output,
    encode_forward_backward_request,
    encode_sample_response,
)

SLOW_IS_FINE = settings(
    deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
INT64S = st.integers(-(1 << 63), (1 << 63) - 1)
INT32S = st.integers(-(1 << 31), (1 << 31) - 1)
NAMES = st.text(max_size=12)
IDS = st.text(min_size=1, max_size=12)


@st.composite
def dense_tensors(draw: st.DrawFn, is_row: bool = False) -> TensorData:
    """Tensors of either type and small shapes, empty ones included.

    As a row of a column, where the first dimension is told by the number of values, a tensor
    has a first dimension and no other that is zero.
    """
    shape = draw(st.lists(st.integers(is_row, 3), max_size=2))
    if is_row:
        shape.insert(0, draw(st.integers(0, 3)))
    dtype: Any = draw(st.sampled_from(["float32", "int64"]))
    size = int(np.prod(shape, dtype=np.int64))
    cells = FLOATS if dtype == "float32" else INT64S
    numbers = draw(st.lists(cells, min_size=size, max_size=size))
    return TensorData(np.array(numbers, dtype), dtype, shape)


@st.composite
def sparse_tensors(draw: st.DrawFn) -> TensorData:
    """CSR tensors, of which some rows are empty."""
    num_rows, num_cols = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    rows = [draw(st.sets(st.integers(0, num_cols - 1))) for _ in range(num_rows)]
    cols = [col for row in rows for col in sorted(row)]
    crow = [sum(map(len, rows[:index])) for index in range(num_rows + 1)]
    values = draw(st.lists(INT64S, min_size=len(cols), max_size=len(cols)))
    return TensorData(np.array(values, np.int64), "int64", [num_rows, num_cols], crow, cols)


SPANS = st.builds(
    lambda kind, sequence_id, offset, length: kind(
        sequence_id=sequence_id, offset=offset, length=length
    ),
    st.sampled_from([PromptProvenanceSpan, SampledProvenanceSpan]),
    IDS,
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
)
CHUNKS = st.one_of(
    st.builds(EncodedTextChunk, tokens=st.lists(st.integers(0, (1 << 31) - 1), max_size=5)),
    st.builds(
        ImageChunk,
        data=st.binary(max_size=9),
        format=st.sampled_from(["png", "jpeg"]),
        expected_tokens=st.none() | st.integers(0, 1 << 20),
    ),
    st.builds(DmelChunk, dmel=st.binary(max_size=9)),
)


@st.composite
def datums(draw: st.DrawFn) -> Datum:
    """Datums with any chunks and tensors, half of them with spans."""
    tensors = st.one_of(dense_tensors(), sparse_tensors())
    spans: tuple[Any, Any] = (None, None)
    if draw(st.booleans()):
        spans = (
            draw(st.lists(SPANS, min_size=1, max_size=3)),
            draw(st.lists(SPANS, max_size=3)),
        )
    return Datum(
        ModelInput(chunks=draw(st.lists(CHUNKS, max_size=3))),
        draw(st.dictionaries(NAMES, tensors, max_size=3)),
        *spans,
    )


CONFIGS = st.none() | st.dictionaries(
    NAMES, st.floats(allow_nan=False) | NAMES, min_size=1, max_size=3
)
INPUTS: st.SearchStrategy[ForwardBackwardInput] = st.builds(
    ForwardBackwardInput, st.lists(datums(), max_size=3), NAMES, CONFIGS
)
REQUESTS: st.SearchStrategy[ForwardBackwardRequest] = st.builds(
    ForwardBackwardRequest, INPUTS, NAMES, INT32S
)
OUTPUTS: st.SearchStrategy[ForwardBackwardOutput] = st.builds(
    ForwardBackwardOutput,
    st.text(st.characters(blacklist_characters=":", codec="utf-8"), min_size=1, max_size=8),
    st.lists(st.dictionaries(NAMES, dense_tensors(is_row=True), max_size=2), max_size=5),
    st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=3),
)


@st.composite
def topks(draw: st.DrawFn) -> TopkLogprobs:
    """Top-k matrices with at least one cell."""
    length, k = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ids = draw(st.lists(INT32S, min_size=length * k, max_size=length * k))
    logprobs = draw(st.lists(FLOATS, min_size=length * k, max_size=length * k))
    return TopkLogprobs(
        np.array(ids, np.int32).reshape(length, k),
        np.array(logprobs, np.float32).reshape(length, k),
    )


def arrays(cells: st.SearchStrategy[Any], dtype: Any, min_size: int) -> st.SearchStrategy[Any]:
    """Flat arrays."""
    numbers = st.lists(cells, min_size=min_size, max_size=6)
    return numbers.map(lambda values: np.array(values, dtype))


SEQUENCES = st.builds(
    SampledSequence,
    st.sampled_from(["stop", "length"]),
    st.just(""),
    arrays(INT32S, np.int32, 0),
    st.none() | arrays(FLOATS, np.float32, 1),
    st.none() | topks(),
)
SAMPLES: st.SearchStrategy[SampleResponse] = st.builds(
    SampleResponse,
    st.lists(SEQUENCES, max_size=3),
    st.none() | arrays(FLOATS | st.just(float("nan")), np.float32, 1),
    st.none() | topks(),
    st.none() | dense_tensors() | sparse_tensors(),
    INT32S,
    st.none() | st.builds(PromptAltTokens, dense_tensors(), dense_tensors()),
)


@SLOW_IS_FINE
@given(REQUESTS, st.booleans())
def test_request_round_trip(request: ForwardBackwardRequest, forward_only: bool) -> None:
    body = encode_forward_backward_request(request, forward_only)
    assert decode_forward_backward_request(body) == (request, forward_only)


@SLOW_IS_FINE
@given(OUTPUTS)
def test_output_round_trip(output: ForwardBackwardOutput) -> None:
    assert decode_forward_backward_output(encode_forward_backward_output(output)) == output


@SLOW_IS_FINE
@given(SAMPLES)
def test_sample_round_trip(response: SampleResponse) -> None:
    assert decode_sample_response(encode_sample_response(response)) == response


# --- damage --------------------------------------------------------------------------------
def full_request() -> bytes:
    """A request that uses every field."""
    datum = Datum(
        ModelInput(
            chunks=[
                EncodedTextChunk(tokens=list(range(130))),
                ImageChunk(data=b"png", format="png", expected_tokens=7),
                DmelChunk(dmel=b"dmel"),
            ]
        ),
        {
            "weights": [0.5] * 40,
            "target_tokens": TensorData([5, 6], "int64", [2, 200], [0, 1, 2], [3, 150]),
        },
        [PromptProvenanceSpan(sequence_id="p", offset=1, length=2)],
        [SampledProvenanceSpan(sequence_id="s", length=200)],
    )
    work = ForwardBackwardInput([datum, datum], "ppo", {"clip": 0.2, "loss_id": "x"})
    return encode_forward_backward_request(ForwardBackwardRequest(work, "model", 300), True)


def full_output() -> bytes:
    """A result with two records."""
    first = {"logprobs": TensorData.from_numpy(np.ones((40, 2), np.float32))}
    second = {"logprobs": TensorData([1, 2, 3], "int64", [3])}
    return encode_forward_backward_output(
        ForwardBackwardOutput("a:Record", [first, first, second], {"loss:sum": 1.5})
    )


def full_sample() -> bytes:
    """A sampling result that uses every field."""
    topk = TopkLogprobs(np.ones((3, 2), np.int32), np.zeros((3, 2), np.float32))
    sequence = SampledSequence(
        "length", "", np.arange(60, dtype=np.int32), np.zeros(60, np.float32), topk
    )
    tensor = TensorData([1, 2, 3, 4], "int64", [2, 2])
    return encode_sample_response(
        SampleResponse(
            [sequence] * 2,
            np.zeros(9, np.float32),
            topk,
            tensor,
            3,
            PromptAltTokens(tensor, tensor),
        )
    )


CASES: list[tuple[Callable[[], bytes], Callable[[bytes], Any]]] = [
    (full_request, decode_forward_backward_request),
    (full_output, decode_forward_backward_output),
    (full_sample, decode_sample_response),
]


@pytest.mark.parametrize(("make", "decode"), CASES)
def test_every_prefix_decodes_or_raises_wire_error(
    make: Callable[[], bytes], decode: Callable[[bytes], Any]
) -> None:
    message = make()
    num_refused = 0
    for end in range(len(message)):
        try:
            decode(message[:end])
        except (WireError, InvalidInput):
            num_refused += 1
    # Only a cut between two fields of the outermost message can pass.
    assert num_refused > len(message) - 20
    decode(message)


@pytest.mark.parametrize(("make", "decode"), CASES)
def test_flipped_bytes_decode_or_raise_wire_error(
    make: Callable[[], bytes], decode: Callable[[bytes], Any]
) -> None:
    rng = random.Random(5)
    message = make()
    for _ in range(800):
        damaged = bytearray(message)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x12))
        try:
            decode(bytes(damaged))
        except (WireError, InvalidInput) as error:
            assert str(error)


@pytest.mark.parametrize(("make", "decode"), CASES)
@SLOW_IS_FINE
@given(data=st.binary(max_size=60))
def test_noise_decodes_or_raises_wire_error(
    make: Callable[[], bytes], decode: Callable[[bytes], Any], data: bytes
) -> None:
    try:
        decode(data)
    except (WireError, InvalidInput) as error:
        assert str(error)
