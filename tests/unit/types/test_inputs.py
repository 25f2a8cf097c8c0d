"""Chunks, ModelInput, provenance and Datum."""

from __future__ import annotations

import copy
import math
import pickle
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tinkex.errors import InvalidInput
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)
from tinkex.types.base import decode_hook, encode_hook

INPUT = ModelInput.from_ints([1, 2, 3])


class Letters:
    """A tokenizer of the alphabet."""

    def encode(self, text: str) -> list[int]:
        """One token per letter."""
        return [ord(letter) - 97 for letter in text]


@pytest.mark.parametrize(
    "tokens",
    [[1, 2], (1, 2), range(1, 3), array("i", [1, 2]), np.array([1, 2], np.int32), [np.int64(1), 2]],
)
def test_any_token_sequence_becomes_a_list(tokens: Any) -> None:
    chunk = EncodedTextChunk(tokens=tokens)
    assert chunk.tokens == [1, 2]
    assert all(type(token) is int for token in chunk.tokens)
    assert chunk.length == 2


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([0, 1, 2, -1], "^token 3 is -1; token ids are integers from 0 to 2147483647$"),
        ([2**31], "token 0 is 2147483648;"),
        ([1, True], "token 1 is True;"),
        ([1.0], "token 0 is 1.0;"),
        (["a"], "token 0 is 'a';"),
        (np.array([0.5]), "token 0 is 0.5;"),
        (np.array([[1, 2]]), r"token 0 is \[1, 2\];"),
        ("ab", "tokens is 'ab'; expected list, got str"),
        (5, "tokens is 5; expected list, got int"),
        (None, "tokens is None; expected list, got None"),
    ],
)
def test_invalid_token_is_refused(tokens: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ModelInput.from_ints(tokens)


def test_largest_token_is_accepted() -> None:
    assert ModelInput.from_ints([0, 2**31 - 1]).to_ints() == [0, 2**31 - 1]


def test_decoded_tokens_are_checked() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"chunks\[0\].tokens\[1\]"):
        msgspec.json.decode(
            b'{"chunks":[{"type":"encoded_text","tokens":[1,-1]}]}', type=ModelInput
        )


def test_image_length_is_expected_tokens() -> None:
    assert ImageChunk(data=b"", format="png", expected_tokens=7).length == 7
    for chunk in (
        ImageChunk(data=b"", format="png"),
        ImageAssetPointerChunk(format="jpeg", location="x"),
    ):
        with pytest.raises(InvalidInput, match="set expected_tokens"):
            _ = chunk.length


@pytest.mark.parametrize(
    ("header", "length"),
    [(b"\x00\x02\x05\x03", 5), (b"\xfe\x07\x01\xac\x02", 300), (b"\x01\x01\x00", 0)],
)
def test_dmel_length_is_the_first_dimension(header: bytes, length: int) -> None:
    assert DmelChunk(dmel=header + b"numbers").length == length


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "cannot end after 0 bytes"),
        (b"\xfe", "cannot end after 1 bytes"),
        (b"\x08\x01\x01", "cannot have type 8"),
        (b"\x00\x02\x05", "cut off after 3 bytes"),
        (b"\x00\x01" + b"\xff" * 10, "over 64 bits"),
        (b"\x00\x00", "needs at least one dimension"),
    ],
)
def test_invalid_dmel_header_is_refused(header: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _ = DmelChunk(dmel=header).length


def test_append_adds_chunks_and_tokens() -> None:
    image = ImageChunk(data=b"x", format="png", expected_tokens=10)
    grown = ModelInput.empty().append_int(1).append(image)
    assert grown.chunks == [EncodedTextChunk(tokens=[1]), image]
    assert grown.length == 11
    with pytest.raises(InvalidInput, match="text chunks only, got a ImageChunk"):
        grown.to_ints()


def test_to_ints_joins_chunks_into_a_new_list() -> None:
    joined = INPUT.append_int(9)
    joined.to_ints().append(0)
    assert joined.to_ints() == [1, 2, 3, 9]


def test_model_input_json_is_the_wire_form() -> None:
    text = ModelInput(
        chunks=[
            EncodedTextChunk(tokens=[1]),
            ImageChunk(data=b"\xff", format="png"),
            ImageAssetPointerChunk(format="png", location="l"),
            DmelChunk(dmel=b"\x00"),
        ]
    )
    assert text.model_dump(exclude_none=True) == {
        "chunks": [
            {"type": "encoded_text", "tokens": [1]},
            {"type": "image", "data": "/w==", "format": "png"},
            {"type": "image_asset_pointer", "format": "png", "location": "l"},
            {"type": "dmel", "dmel": "AA=="},
        ]
    }
    assert msgspec.json.decode(text.model_dump_json(), type=ModelInput) == text


def test_unknown_chunk_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"chunks\[0\].type is 'video'"):
        ModelInput.model_validate({"chunks": [{"type": "video"}]})
    with pytest.raises(InvalidInput, match=r"chunks\[0\] is 5; expected dict, got int"):
        ModelInput(chunks=[5])  # type: ignore[list-item]


def test_from_text_uses_the_tokenizer() -> None:
    assert ModelInput.from_text("abc", Letters()).to_ints() == [0, 1, 2]
    encoding = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[len(text)]))
    assert ModelInput.from_text("abc", encoding).to_ints() == [3]


def test_from_text_refuses_invalid_arguments() -> None:
    with pytest.raises(InvalidInput, match="takes a string, got 5"):
        ModelInput.from_text(5, Letters())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="turns text into tokens, got 'gpt'"):
        ModelInput.from_text("abc", "gpt")
    with pytest.raises(InvalidInput, match="token 0 is 'abc'"):
        ModelInput.from_text("abc", SimpleNamespace(encode=lambda text: [text]))


@pytest.mark.parametrize(
    ("name", "given", "dtype"),
    [
        ("target_tokens", [1, 2, 3], "int64"),
        ("target_tokens", [1.0, 2.0, 3.0], "int64"),
        ("target_tokens", (1, 2, 3), "int64"),
        ("weights", [1, 2, 3], "float32"),
        ("advantages", [1, 2, 3], "float32"),
        ("logprobs", [1, 2, 3], "float32"),
        ("clip_low_threshold", [1, 2, 3], "float32"),
        ("clip_high_threshold", [1, 2, 3], "float32"),
        ("sequence_ratio_mask", [1, 2, 3], "float32"),
        ("anything", [1, 2, 3], "int64"),
        ("anything", [1, 2.0, 3], "float32"),
        ("weights", np.array([1, 2, 3]), "int64"),
        ("target_tokens", np.array([1.0, 2.0, 3.0]), "float32"),
        ("weights", TensorData([1, 2, 3], "int64"), "int64"),
    ],
)
def test_loss_inputs_become_tensors(name: str, given: Any, dtype: str) -> None:
    tensor = Datum(INPUT, {name: given}).loss_fn_inputs[name]
    assert (tensor.dtype, tensor.data, tensor.shape) == (dtype, [1, 2, 3], [3])


def test_nested_lists_keep_their_shape() -> None:
    tensors = Datum(INPUT, {"target_tokens": [[1, 2], [3, 4]], "x": [[1], [2.5]]}).loss_fn_inputs
    assert tensors["target_tokens"].tolist() == [[1, 2], [3, 4]]
    assert tensors["x"].tolist() == [[1.0], [2.5]]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("weights", [0.0, 1.0, 2.0, math.nan], r"^weights\[3\] is nan; loss inputs must be"),
        ("advantages", [math.inf], r"^advantages\[0\] is inf"),
        ("logprobs", np.array([0.0, -math.inf]), r"^logprobs\[1\] is -inf"),
        ("x", TensorData([[0.0, math.nan]], "float32"), r"^x\[0, 1\] is nan"),
        ("weights", [[1.0], [1.0, 2.0]], r"loss_fn_inputs\['weights'\]: weights must be numbers"),
        ("weights", ["a"], r"loss_fn_inputs\['weights'\]: .* got \['a'\]"),
        ("other", [None], r"loss_fn_inputs\['other'\]"),
        ("target_tokens", [1, 2.5], r"target_tokens\[1\] is 2.5, which int64 cannot hold"),
        ("mask", np.array([True]), r"loss_fn_inputs\['mask'\]: an array of bool"),
        ("weights", np.array([1], np.uint8), r"loss_fn_inputs\['weights'\]: an array of uint8"),
        ("weights", "abc", r"loss_fn_inputs\['weights'\]: expected a tensor, .* got 'abc'"),
    ],
)
def test_invalid_loss_inputs_are_refused_by_name(name: str, given: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Datum(INPUT, {name: given})


@pytest.mark.parametrize("name", ["target_tokens", "weights"])
def test_mostly_empty_matrices_become_sparse(name: str) -> None:
    matrix = np.zeros((4, 50), np.float32)
    matrix[1, 7] = 3
    tensor = Datum(INPUT, {name: matrix}).loss_fn_inputs[name]
    assert (tensor.sparse_crow_indices, tensor.sparse_col_indices) == ([0, 0, 1, 1, 1], [7])
    assert np.array_equal(tensor.to_numpy(), matrix)
    assert not Datum(INPUT, {"other": matrix}).loss_fn_inputs["other"].is_sparse
    assert not Datum(INPUT, {name: np.ones((4, 50))}).loss_fn_inputs[name].is_sparse


def test_nan_in_sparse_matrix_is_reported_at_dense_position() -> None:
    matrix = np.zeros((4, 50), np.float32)
    matrix[2, 9] = math.nan
    with pytest.raises(InvalidInput, match=r"^weights\[2, 9\] is nan"):
        Datum(INPUT, {"weights": matrix})


def test_datum_needs_model_input_and_dict() -> None:
    with pytest.raises(InvalidInput, match=r"model_input must be a ModelInput, got \[1\]"):
        Datum([1])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"loss_fn_inputs must be a dict, got \[1\]"):
        Datum(INPUT, [1])  # type: ignore[arg-type]
    assert Datum(model_input=INPUT).loss_fn_inputs == {}


def test_datums_compare_pickle_and_copy_by_value() -> None:
    datum = Datum(INPUT, {"weights": [1.0, 0.5, 0.0]})
    assert datum == Datum(INPUT, {"weights": np.array([1.0, 0.5, 0.0], np.float32)})
    assert pickle.loads(pickle.dumps(datum)) == copy.deepcopy(datum) == datum


def test_datum_round_trips_through_json() -> None:
    datum = Datum(INPUT, {"weights": [1.0, 0.5, 0.0]})
    data = msgspec.json.encode(datum, enc_hook=encode_hook)
    assert msgspec.json.decode(data, type=Datum, dec_hook=decode_hook) == datum


def test_provenance_covers_both_fields() -> None:
    prompt = PromptProvenanceSpan(sequence_id="a", length=2)
    sampled = SampledProvenanceSpan(sequence_id="a", offset=1, length=1)
    datum = Datum(INPUT, {"target_tokens": [2, 3, 4]})
    marked = datum.with_provenance([prompt, sampled], [prompt, sampled])
    assert marked.model_input_spans == marked.loss_fn_input_spans == [prompt, sampled]
    assert marked.loss_fn_inputs == datum.loss_fn_inputs
    with pytest.raises(InvalidInput, match=r"model_input spans cover 2 positions, .* are 3"):
        datum.with_provenance([prompt], [prompt, sampled])
    with pytest.raises(InvalidInput, match=r"loss_fn_inputs spans cover 1 positions, .* are 3"):
        datum.with_provenance([prompt, sampled], [sampled])


def test_provenance_spans_are_set_in_pairs() -> None:
    span = PromptProvenanceSpan(sequence_id="a", length=3)
    with pytest.raises(InvalidInput, match="go together"):
        Datum(INPUT, {}, [span])
    with pytest.raises(InvalidInput, match="model_input_spans holds provenance spans, got 5"):
        Datum(INPUT, {}, [5], [span])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sequence_id": ""}, "sequence_id is ''"),
        ({"offset": -1}, "offset is -1; expected at least 0"),
        ({"length": -2}, "length is -2; expected at least 0"),
    ],
)
@pytest.mark.parametrize("kind", [PromptProvenanceSpan, SampledProvenanceSpan])
def test_invalid_span_is_refused(kind: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"{kind.__name__}.{message}"):
        kind(**{"sequence_id": "a", "length": 1, **wrong})
