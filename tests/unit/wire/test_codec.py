"""The JSON codec: None omitted, NaN refused, token lists not copied."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest

from tinkex import types
from tinkex.errors import InvalidInput
from tinkex.types import (
    AdamParams,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    OptimizerConfigBase,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
    TensorData,
)
from tinkex.wire.codec import decode_json, encode_json


def read(message: object) -> Any:
    return json.loads(encode_json(message))


def ask(**fields: Any) -> SampleRequest:
    prompt = fields.pop("prompt", ModelInput.from_ints([1, 2]))
    return SampleRequest(prompt=prompt, sampling_params=SamplingParams(max_tokens=5), **fields)


class Shade(Enum):
    DARK = "dark"


class Everything(msgspec.Struct, rename={"renamed": "other"}):
    needed: int | None
    renamed: int = 1
    numbers: list[float] = msgspec.field(default_factory=list)
    anything: Any = None
    shade: Shade = Shade.DARK
    when: datetime | None = None
    word: Literal["a", "b"] = "a"
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]] = msgspec.field(default_factory=list)


def test_sample_request_matches_the_official_client() -> None:
    assert read(ask(sampling_session_id="s", seq_id=3, prompt_logprobs=False)) == {
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 5, "temperature": 1, "top_k": -1, "top_p": 1},
        "sampling_session_id": "s",
        "seq_id": 3,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "type": "sample",
    }


def test_tensor_is_an_object() -> None:
    sparse = TensorData([5], "int64", [2, 2], [0, 0, 1], [1])
    wire = {"data": [5], "dtype": "int64", "shape": [2, 2]}
    indices = {"sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [1]}
    request = ask(target_prompt_logprobs=sparse)
    assert read(request)["target_prompt_logprobs"] == wire | indices
    assert decode_json(encode_json(request), SampleRequest) == request


def test_bytes_are_base64() -> None:
    chunk = ImageChunk(data=b"\x00\xff", format="png")
    assert read(chunk) == {"type": "image", "data": "AP8=", "format": "png"}
    assert decode_json(encode_json(chunk), ImageChunk) == chunk


def test_none_is_omitted_for_optional_fields() -> None:
    assert "when" not in read(Everything(needed=1))
    assert read(Everything(needed=None))["needed"] is None


def test_none_in_dict_or_list_is_kept() -> None:
    assert read({"a": None, "b": [None, ask(), {"c": None}]})["a"] is None
    assert read({"b": [None]}) == {"b": [None]}


def test_defaults_renamed_fields_enums_and_dates_are_encoded() -> None:
    when = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)
    assert read(Everything(needed=1, when=when)) == {
        "needed": 1,
        "other": 1,
        "numbers": [],
        "shade": "dark",
        "when": "2026-05-01T12:30:00Z",
        "word": "a",
        "tokens": [],
    }


def test_open_record_is_encoded_with_all_fields() -> None:
    config = OptimizerConfigBase(type="new", depth=3, nested={"x": [1.5]})
    assert read({"optimizer_config": config}) == {
        "optimizer_config": {"type": "new", "depth": 3, "nested": {"x": [1.5]}}
    }


def test_numpy_numbers_are_encoded() -> None:
    wire = read({"a": np.float32(0.5), "b": np.int64(3), "c": np.arange(3), "d": np.float64(2)})
    assert wire == {"a": 0.5, "b": 3, "c": [0, 1, 2], "d": 2.0}


def adam_with(value: float) -> OptimStepRequest:
    params = AdamParams(learning_rate=1e-4)
    msgspec.structs.force_setattr(params, "learning_rate", value)
    return OptimStepRequest(optim_params=params, model_id="m", seq_id=1)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (adam_with(float("nan")), r"adam_params.learning_rate is nan; JSON has no such number"),
        (adam_with(float("-inf")), r"adam_params.learning_rate is -inf"),
        ({"a": [1.0, {"b": float("nan")}]}, r"a\[1\].b is nan"),
        (Everything(needed=1, numbers=[0.0, float("inf")]), r"numbers\[1\] is inf"),
        (Everything(needed=1, anything={"x": (1, float("nan"))}), r"anything.x\[1\] is nan"),
        ({"x": np.float32("nan")}, "x is nan"),
        ({"x": np.array([1.0, np.nan])}, r"x\[1\] is nan"),
        ({"t": TensorData([1.0, float("nan")], "float32")}, r"t\[1\] is nan"),
        (float("nan"), "the message is nan"),
        ({"c": OptimizerConfigBase(type="t", rate=float("inf"))}, "c.rate is inf"),
    ],
)
def test_nan_and_infinity_are_refused_by_name(message: object, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        encode_json(message)


@pytest.mark.parametrize("value", [object(), "\ud800", {(1, 2): 3}])
def test_unencodable_value_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="cannot be written as JSON"):
        encode_json({"x": value})


def test_token_lists_are_not_traversed() -> None:
    class Counted(list[int]):
        num_walks = 0

        def __iter__(self) -> Any:
            Counted.num_walks += 1
            return super().__iter__()

    chunk = EncodedTextChunk(tokens=[1, 2, 3])
    msgspec.structs.force_setattr(chunk, "tokens", Counted([1, 2, 3]))
    assert read(ask(prompt=ModelInput(chunks=[chunk])))["prompt"]["chunks"][0]["tokens"] == [
        1,
        2,
        3,
    ]
    assert Counted.num_walks == 0


def test_long_prompt_round_trip() -> None:
    request = ask(prompt=ModelInput.from_ints(list(range(200_000))))
    assert decode_json(encode_json(request), SampleRequest) == request


def test_decoding_ignores_unknown_fields_and_refuses_wrong_ones() -> None:
    reply = decode_json(b'{"request_id": "r", "new": 1}', types.UntypedAPIFuture)
    assert reply.request_id == "r"
    with pytest.raises(msgspec.ValidationError, match="request_id"):
        decode_json(b'{"request_id": 5}', types.UntypedAPIFuture)
    with pytest.raises(msgspec.DecodeError):
        decode_json(b"<html>", types.UntypedAPIFuture)


def test_decoding_rejects_a_tensor_of_the_wrong_shape() -> None:
    body = encode_json(ask(target_prompt_logprobs=TensorData([5], "int64", [1, 1])))
    with pytest.raises(msgspec.ValidationError, match="target_prompt_logprobs"):
        decode_json(body.replace(b"[1,1]", b"[1,2]"), SampleRequest)


def test_builtin_types_are_decoded() -> None:
    assert decode_json(b'{"a": [1]}', dict[str, list[int]]) == {"a": [1]}
