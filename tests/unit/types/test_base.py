"""Base classes of values: validated construction and pydantic-like methods."""

from __future__ import annotations

import copy
import json
import pickle
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest

from tinkex.errors import InvalidInput
from tinkex.types import (
    AdamParams,
    Checkpoint,
    CreateModelRequest,
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    LoraConfig,
    ModelInput,
    SampleRequest,
    SamplingParams,
    SessionSearchRequest,
    TensorData,
)
from tinkex.types.base import Value, decode_hook, encode_hook, to_builtin

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CHECKPOINT = Checkpoint(
    checkpoint_id="weights/1", checkpoint_type="training", time=WHEN, tinker_path="tinker://r"
)


def test_misspelled_field_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidInput, match="no field 'max_token'; did you mean 'max_tokens'\\?"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]


def test_unrelated_field_gets_no_suggestion() -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(zzz=5)  # type: ignore[call-arg]
    assert str(caught.value) == "SamplingParams has no field 'zzz'"


def test_missing_field_is_named() -> None:
    with pytest.raises(InvalidInput, match="LoraConfig needs 'rank'"):
        LoraConfig()  # type: ignore[call-arg]


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(InvalidInput, match="LoraConfig takes keywords only, got 8"):
        LoraConfig(8)  # type: ignore[call-arg]


def test_wrong_type_is_reported_with_its_value() -> None:
    with pytest.raises(InvalidInput, match=r"LoraConfig\.rank is '8'; expected int, got str"):
        LoraConfig(rank="8")  # type: ignore[arg-type]


def test_wrong_literal_names_the_choices() -> None:
    with pytest.raises(InvalidInput, match="format is 'gif'; expected 'png' or 'jpeg'"):
        ImageChunk(data=b"", format="gif")  # type: ignore[arg-type]


def test_nested_error_has_its_path() -> None:
    with pytest.raises(InvalidInput, match=r"CreateModelRequest\.lora_config\.seed is 'x'"):
        CreateModelRequest(
            session_id="s",
            model_seq_id=0,
            base_model="b",
            lora_config={"rank": 8, "seed": "x"},  # type: ignore[arg-type]
        )


def test_error_of_nested_value_is_unchanged() -> None:
    with pytest.raises(InvalidInput, match=r"^LoraConfig\.rank is 0; expected at least 1$"):
        CreateModelRequest(
            session_id="s",
            model_seq_id=0,
            base_model="b",
            lora_config={"rank": 0},  # type: ignore[arg-type]
        )


def test_decoding_runs_the_same_checks_and_msgspec_reports_them() -> None:
    with pytest.raises(msgspec.ValidationError, match="rank is 0"):
        msgspec.json.decode(b'{"rank": 0}', type=LoraConfig)


def test_decoding_ignores_unknown_fields() -> None:
    assert msgspec.json.decode(b'{"rank": 8, "new": 1}', type=LoraConfig) == LoraConfig(rank=8)


def test_correct_tag_is_accepted() -> None:
    chunk = EncodedTextChunk(tokens=[1], type="encoded_text")  # type: ignore[call-arg]
    assert chunk.type == EncodedTextChunk.type == "encoded_text"
    with pytest.raises(InvalidInput, match="type is 'image'; expected 'encoded_text'"):
        EncodedTextChunk(tokens=[1], type="image")  # type: ignore[call-arg]


def test_numpy_scalars_are_accepted() -> None:
    params = AdamParams(learning_rate=np.float32(0.5), beta1=np.float64(0.25))  # type: ignore[arg-type]
    assert (params.learning_rate, params.beta1) == (0.5, 0.25)
    assert type(params.learning_rate) is float
    assert LoraConfig(rank=np.int64(4)).rank == 4  # type: ignore[arg-type]


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        LoraConfig(rank=8).rank = 9  # type: ignore[misc]


def test_list_argument_is_copied() -> None:
    tokens = [1, 2]
    chunk = EncodedTextChunk(tokens=tokens)
    tokens.append(3)
    assert list(chunk.tokens) == [1, 2]


def test_nested_values_are_not_rebuilt() -> None:
    chunk = EncodedTextChunk(tokens=[1])
    assert ModelInput(chunks=[chunk]).chunks[0] is chunk


@pytest.mark.parametrize(
    "value",
    [
        CHECKPOINT,
        ModelInput(chunks=[EncodedTextChunk(tokens=[1]), ImageChunk(data=b"\x00", format="png")]),
        SampleRequest(
            prompt=ModelInput.from_ints([1]),
            sampling_params=SamplingParams(stop=[1, 2]),
            target_prompt_logprobs=TensorData([1, -1], "int64", [2, 1]),
        ),
    ],
)
def test_values_round_trip_through_dump_pickle_and_copy(value: Value) -> None:
    kind = type(value)
    assert kind.model_validate(value.model_dump()) == value
    assert kind.model_validate(value.model_dump(mode="json")) == value
    assert kind.model_validate_json(value.model_dump_json()) == value
    assert pickle.loads(pickle.dumps(value)) == value
    assert copy.deepcopy(value) == copy.copy(value) == value


def test_dump_keeps_or_formats_datetimes() -> None:
    assert CHECKPOINT.model_dump()["time"] == WHEN
    assert CHECKPOINT.model_dump(mode="json")["time"] == "2026-01-02T03:04:05Z"


def test_dump_can_omit_none_at_every_depth() -> None:
    request = SampleRequest(prompt=ModelInput.empty(), sampling_params=SamplingParams())
    dumped = request.model_dump(exclude_none=True)
    assert dumped["sampling_params"] == {"temperature": 1, "top_k": -1, "top_p": 1}
    assert "seq_id" not in dumped


def test_dump_json_can_be_indented() -> None:
    text = LoraConfig(rank=8).model_dump_json(indent=2)
    assert text.startswith('{\n  "rank": 8')
    assert json.loads(text)["train_attn"] is True


def test_copy_validates_changes() -> None:
    config = LoraConfig(rank=8)
    assert config.model_copy(update={"rank": 16}) == LoraConfig(rank=16)
    assert config.model_copy() == config
    with pytest.raises(InvalidInput, match="rank is -1"):
        config.model_copy(update={"rank": -1})


def test_validate_returns_instance_unchanged() -> None:
    config = LoraConfig(rank=8)
    assert LoraConfig.model_validate(config) is config


@pytest.mark.parametrize("wrong", [5, "x", [1]])
def test_validate_needs_a_mapping(wrong: object) -> None:
    with pytest.raises(InvalidInput, match="LoraConfig must be a mapping"):
        LoraConfig.model_validate(wrong)


def test_validate_json_needs_json() -> None:
    with pytest.raises(InvalidInput, match="LoraConfig: invalid JSON"):
        LoraConfig.model_validate_json("{rank: 8}")


def test_bytes_are_encoded_as_base64() -> None:
    assert ImageChunk(data=b"\xff\x00", format="png").model_dump()["data"] == "/wA="
    assert DmelChunk(dmel="/wA=").dmel == b"\xff\x00"  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="base64"):
        DmelChunk(dmel="?")  # type: ignore[arg-type]


def test_bounds_are_validated() -> None:
    assert SessionSearchRequest(limit=200).limit == 200
    with pytest.raises(InvalidInput, match=r"limit is 201; expected int <= 200"):
        SessionSearchRequest(limit=201)


def test_hooks_refuse_types_without_wire_form() -> None:
    with pytest.raises(NotImplementedError, match="object has no form on the wire"):
        encode_hook(object())
    with pytest.raises(NotImplementedError, match="Random cannot be read"):
        decode_hook(type("Random", (), {}), {})


def test_hooks_accept_numpy_and_instances() -> None:
    tensor = TensorData([1], "int64")
    assert encode_hook(np.arange(2)) == [0, 1]
    assert decode_hook(TensorData, tensor) is tensor


def test_to_builtin_keeps_booleans_and_values() -> None:
    tensor = TensorData([1], "int64")
    assert to_builtin(True) is True
    assert to_builtin(tensor) is tensor
    assert to_builtin({"a": (np.int8(1), range(2))}) == {"a": [1, [0, 1]]}


# --- what scripts know from pydantic ---------------------------------------------------------
def test_dump_includes_and_excludes_fields() -> None:
    params = SamplingParams(max_tokens=5, temperature=0.5)
    assert params.model_dump(include={"max_tokens", "seed"}) == {"max_tokens": 5, "seed": None}
    assert "seed" not in params.model_dump(exclude=["seed"])
    assert params.model_dump(exclude_defaults=True) == {"max_tokens": 5, "temperature": 0.5}
    assert EncodedTextChunk(tokens=[1]).model_dump(exclude_defaults=True) == {"tokens": [1]}
    assert json.loads(params.model_dump_json(exclude_none=True, include={"max_tokens"})) == {
        "max_tokens": 5
    }


def test_older_method_names_are_equivalent() -> None:
    config = LoraConfig(rank=8)
    assert config.dict(exclude_none=True) == config.model_dump(exclude_none=True)
    assert config.json(indent=2) == config.model_dump_json(indent=2)
    assert config.copy(update={"rank": 16}) == LoraConfig(rank=16)
    assert LoraConfig.parse_obj({"rank": 8}) == config


def test_deep_copy_shares_no_list() -> None:
    chunk = EncodedTextChunk(tokens=[1, 2])
    assert chunk.model_copy(deep=True).tokens is not chunk.tokens


def test_fields_are_described() -> None:
    fields = LoraConfig.model_fields
    assert list(fields)[:5] == ["rank", "seed", "train_unembed", "train_mlp", "train_attn"]
    assert (fields["rank"].is_required(), fields["rank"].default) == (True, None)
    assert (fields["train_mlp"].is_required(), fields["train_mlp"].default) == (False, True)
    assert fields["train_mlp"].annotation is bool
    assert CreateModelRequest.model_fields["user_metadata"].get_default() in (None, {})
