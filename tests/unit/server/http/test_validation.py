from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import InvalidInput, UnprocessableEntityError
from tinkex.server.http.request_body import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_VALUES,
    MAX_METADATA_BYTES,
    MAX_SPARSE_CELLS,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
    check_json,
    check_metadata,
    check_sparse_size,
    is_zstd_encoded,
    read_body,
)
from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    ModelInput,
    TensorData,
)


class Pipe:
    """An ASGI `receive` that returns one chunk at a time."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    async def __call__(self) -> dict[str, object]:
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}


@pytest.mark.asyncio
@pytest.mark.parametrize("pieces", [(b"",), (b"abc",), (b"a", b"", b"bc"), (b"abc", b"")])
async def test_body_within_limit_is_read(pieces: tuple[bytes, ...]) -> None:
    assert await read_body(Pipe(*pieces), None, 3, 9.0) == b"".join(pieces)


@pytest.mark.asyncio
@pytest.mark.parametrize("pieces", [(b"abcd",), (b"ab", b"cd"), (b"abc", b"d", b"e")])
async def test_body_above_limit_is_rejected(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(PayloadTooLarge, match="the limit is 3"):
        await read_body(Pipe(*pieces), None, 3, 9.0)


class Silence:
    """A client that sends one chunk and then stalls."""

    def __init__(self) -> None:
        self._pieces = [b"ab"]

    async def __call__(self) -> dict[str, object]:
        if not self._pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._pieces.pop(), "more_body": True}


@pytest.mark.asyncio
async def test_stalled_body_is_retryable_timeout() -> None:
    with pytest.raises(RequestTimeout) as caught:
        await read_body(Silence(), None, 100, 0.01)
    assert caught.value.status_code == 408
    assert caught.value.should_retry


@pytest.mark.asyncio
async def test_chunks_are_counted_before_they_are_stored() -> None:
    counted: list[int] = []
    await read_body(Pipe(b"ab", b"c"), None, 9, 9.0, counted.append)
    assert counted == [2, 1]


def test_long_metadata_is_rejected_before_decoding() -> None:
    # Decoding this would create a million objects.
    body = b'{"user_metadata": [' + b"{}," * 1_000_000 + b"{}]}"
    with pytest.raises(UnprocessableEntityError, match="user_metadata has 3000004 bytes"):
        check_metadata(body)
    check_metadata(b'{"user_metadata": "' + b"x" * (MAX_METADATA_BYTES - 2) + b'"}')
    check_metadata(b'{"tags": []}')


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"[" + b"{}," * MAX_JSON_CONTAINERS + b"0]", "objects and lists"),
        (b"[" * (MAX_JSON_CONTAINERS + 1), "objects and lists"),
        (b"[" + b"1," * MAX_JSON_VALUES + b"1,1]", "values"),
    ],
)
def test_json_with_too_many_objects_is_rejected(body: bytes, sentence: str) -> None:
    with pytest.raises(UnprocessableEntityError, match=sentence):
        check_json(body)


@pytest.mark.parametrize(
    ("encoding", "is_packed"), [("", False), ("identity", False), ("zstd", True)]
)
def test_zstd_encoding_is_recognized(encoding: str, is_packed: bool) -> None:
    assert is_zstd_encoded(encoding) is is_packed


def test_unknown_encodings_are_415() -> None:
    with pytest.raises(UnsupportedMediaType) as caught:
        is_zstd_encoded("gzip")
    assert caught.value.status_code == 415


@given(st.text())
def test_nul_in_string_is_rejected(text: str) -> None:
    body = json.dumps({"x": text}).encode()
    if "\x00" in text:
        with pytest.raises(UnprocessableEntityError):
            check_json(body)
    else:
        check_json(body)


def _pass(*tensors: TensorData) -> ForwardBackwardRequest:
    datums = [Datum(ModelInput.from_ints([1]), {"weights": tensor}) for tensor in tensors]
    return ForwardBackwardRequest(ForwardBackwardInput(datums, "cross_entropy"), "m", 1)


def _sparse(num_cells: int) -> TensorData:
    return TensorData([1.0], "float32", [1, num_cells], [0, 1], [0])


def test_sparse_cells_up_to_limit() -> None:
    check_sparse_size(_pass(_sparse(MAX_SPARSE_CELLS - 5), _sparse(5)))


@pytest.mark.parametrize("num_cells", [MAX_SPARSE_CELLS, 1 << 60])
def test_sparse_cells_above_limit_are_rejected(num_cells: int) -> None:
    request = _pass(_sparse(num_cells), _sparse(1))
    forward = ForwardRequest(request.forward_backward_input, "m", 1)
    for asked in (request, forward):
        with pytest.raises(InvalidInput, match="cells"):
            check_sparse_size(asked)


def test_dense_tensors_have_no_cell_limit() -> None:
    check_sparse_size(_pass(TensorData([1.0] * 10, "float32")))
    check_sparse_size(object())
