"""Compare the types with the installed official package: names, fields and behaviour."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from datetime import UTC, datetime
from enum import Enum
from functools import cached_property
from types import UnionType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pydantic
import pytest
import tinker.types as official
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.acceptance.test_surface_0_39 import SURFACE
from tinkex import types as ours
from tinkex.errors import InvalidInput

#: All known differences and their reasons; remove those that no longer exist.
ALLOWED = {
    "OptimStepRequest.optim_params": "a property; the fields carry the names they have on the wire",
    "OptimStepRequest.adam_params": "official reads this name and writes it, but has no such field",
    "OptimStepRequest.optimizer_params": "the same, for every other family",
    "SessionStartEvent.event": "the tag of a union, so it has a default",
    "SessionEndEvent.event": "the tag of a union, so it has a default",
    "UnhandledExceptionEvent.event": "the tag of a union, so it has a default",
    "GetSamplerResponse.tokenizer_id": "tinkex servers say it, others leave it out",
    "TrainingRun.name": "tinkex servers report it, others leave it out",
    "TrainingRun.state": "the same",
    "TrainingRun.step": "the same",
    "TrainingRun.metrics": "the same",
    "TrainingRun.created_at": "the same",
    "Checkpoint.base_model": "since 0.39",
    "DimuonParams.damping": "documented, but the official class has no such field",
    "DimuonParams.rank_lr_correction_exponent": "the same",
    "LoraConfig.alpha": "an option of tinkex servers, sent only if it is set",
    "LoraConfig.use_rslora": "the same",
    "LoraConfig.target_modules": "the same",
    "LoraConfig.dropout": "the same",
    "WeightsInfoResponse.alpha": "tinkex servers report it unless it is the default",
    "WeightsInfoResponse.use_rslora": "the same",
    "WeightsInfoResponse.target_modules": "the same",
    "LoadWeightsRequest.optimizer": "has a default, as requests of SDKs before 0.6 lack it",
    "OptimizerConfig": "known families are distinguished; the official package uses the open base",
    "OptimParams": "the same",
}


#: Types of 0.39, which the installed package does not have; see test_surface_0_39.py.
NEW_TYPES = {name for name in SURFACE["types"] if not hasattr(official, name)}
COMPARED = [name for name in ours.__all__ if name not in NEW_TYPES]


def test_type_names_match() -> None:
    exported = {
        name
        for name, value in vars(official).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert set(ours.__all__) == exported | NEW_TYPES


def plain(value: Any) -> Any:
    """Convert defaults of either package to builtins."""
    return value.model_dump() if hasattr(value, "model_dump") else value


def shape_of(hint: Any) -> Any:
    """Return a type as nested tuples of names, independent of its spelling."""
    hint = getattr(hint, "union", hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated or origin is typing.ClassVar:
        return shape_of(arguments[0])
    if origin is typing.Literal:
        return ("Literal", frozenset(arguments))
    if origin in (typing.Union, UnionType):
        shapes = {shape_of(argument) for argument in arguments}
        return shapes.pop() if len(shapes) == 1 else ("Union", frozenset(shapes))
    if origin is not None:
        return (getattr(origin, "__name__", str(origin)), *map(shape_of, arguments))
    return getattr(hint, "__name__", str(hint))


def literals_of(shape: Any) -> set[Any]:
    """Return all literals in a type, at any depth."""
    if not isinstance(shape, tuple):
        return set()
    if shape[0] == "Literal":
        return set(shape[1])
    parts = shape[1] if shape[0] == "Union" else shape[1:]
    return set().union(*map(literals_of, parts))


Field = tuple[bool, Any]


def official_fields(model: type[pydantic.BaseModel]) -> dict[str, Field]:
    """Return for each field whether it is required, and its default."""
    return {
        name: (field.is_required(), plain(field.get_default(call_default_factory=True)))
        for name, field in model.model_fields.items()
    }


def our_fields(struct: type[msgspec.Struct]) -> dict[str, Field]:
    """Like the pydantic version; a tag counts as a field with a default."""
    fields: dict[str, Field] = {}
    for field in msgspec.structs.fields(struct):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        missing = pydantic.fields.PydanticUndefined if field.required else plain(default)
        fields[field.encode_name] = (field.required, missing)
    config = struct.__struct_config__
    if config.tag_field:
        fields[config.tag_field] = (False, config.tag)
    return fields


def model_differences(name: str, theirs: Any, mine: Any) -> dict[str, str]:
    """Return the differences between a pydantic model and a struct."""
    found: dict[str, str] = {}
    one, other = official_fields(theirs), our_fields(mine)
    for field in one.keys() | other.keys():
        if one.get(field) != other.get(field):
            found[f"{name}.{field}"] = f"official {one.get(field)}, ours {other.get(field)}"
    hints = typing.get_type_hints(mine, include_extras=True)
    for field in one.keys() & hints.keys():
        theirs_hint = shape_of(theirs.model_fields[field].annotation)
        if literals_of(theirs_hint) != literals_of(shape_of(hints[field])):
            found.setdefault(f"{name}.{field}", f"literals differ from {theirs_hint}")
    return found


def parameters(function: Any) -> list[tuple[str, Any]]:
    """Return names and defaults in order."""
    return [
        (parameter.name, "factory" if "factory" in repr(parameter.default) else parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]


def is_theirs(function: Any) -> bool:
    """Return whether the official package defines it, not pydantic."""
    return inspect.isfunction(function) and function.__module__.startswith("tinker.")


def member_differences(name: str, theirs: Any, mine: Any) -> dict[str, str]:
    """Return the differences between the public methods and properties of two classes."""
    decorators = getattr(theirs, "__pydantic_decorators__", None)
    machinery: set[str] = set()
    for kind in ("field_validators", "field_serializers", "model_validators", "model_serializers"):
        machinery |= set(getattr(decorators, kind, {}))
    found: dict[str, str] = {}
    for member, value in inspect.getmembers_static(theirs):
        if member.startswith("_") or member in machinery:
            continue
        key = f"{name}.{member}"
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property | cached_property):
            getter = value.fget if isinstance(value, property) else value.func
            if is_theirs(getter) and callable(getattr(mine, member, print)):
                found[key] = "no such property"
        elif is_theirs(function):
            if not hasattr(mine, member):
                found[key] = "no such method"
            elif parameters(getattr(theirs, member)) != parameters(getattr(mine, member)):
                found[key] = f"official takes {parameters(getattr(theirs, member))}"
    return found


def differences(name: str) -> dict[str, str]:
    """Return all differences of one exported name, by `Type` or `Type.field`."""
    theirs, mine = getattr(official, name), getattr(ours, name)
    if not inspect.isclass(theirs) or typing.get_origin(theirs) is not None or theirs is str:
        one, other = shape_of(theirs), shape_of(mine)
        return {} if one == other else {name: f"official {one}, ours {other}"}
    if issubclass(theirs, Enum):
        same = {m.name: m.value for m in theirs} == {m.name: m.value for m in mine}
        return {} if same else {name: "members differ"}
    found = member_differences(name, theirs, mine)
    if issubclass(theirs, pydantic.BaseModel):
        return found | model_differences(name, theirs, mine)
    assert dataclasses.is_dataclass(theirs)
    if parameters(theirs) != parameters(mine):
        found[name] = f"official takes {parameters(theirs)}"
    return found


@pytest.mark.parametrize("name", COMPARED)
def test_types_match_except_allowed_differences(name: str) -> None:
    assert {key: what for key, what in differences(name).items() if key not in ALLOWED} == {}


def test_every_allowed_difference_still_exists() -> None:
    existing = {key for name in COMPARED for key in differences(name)}
    assert ALLOWED.keys() - existing == set()


def test_comparison_detects_differences() -> None:
    class LoraConfig(ours.LoraConfig):
        seed: int | None = 5

    found = model_differences("LoraConfig", official.LoraConfig, LoraConfig)
    assert found.keys() - ALLOWED.keys() == {"LoraConfig.seed"}
    assert "LoraConfig.rank" in model_differences("LoraConfig", official.LoraConfig, ours.Cursor)


# --- the same JSON -------------------------------------------------------------------------
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def requests(package: Any) -> list[Any]:
    """Build request messages with one package's classes."""
    prompt = package.ModelInput.from_ints([1, 2]).append(
        package.ImageChunk(data=b"\xff\x00", format="png", expected_tokens=3)
    )
    return [
        prompt.append_int(7),
        package.DmelChunk(dmel=b"\x00\x01\x02"),
        package.SampleRequest(
            prompt=prompt,
            sampling_params=package.SamplingParams(max_tokens=5, stop=["a"], temperature=0.5),
            sampling_session_id="s:sample:0",
            seq_id=10**9,
            prompt_logprobs=True,
        ),
        package.CreateModelRequest(
            session_id="s",
            model_seq_id=0,
            base_model="b",
            lora_config=package.LoraConfig(rank=8, seed=1),
            optimizer_config=package.DimuonOptimizerConfig(),
        ),
        package.OptimStepRequest(optim_params=package.AdamParams(), model_id="m", seq_id=1),
        package.OptimStepRequest(
            optim_params=package.DimuonParams(learning_rate=0.5), model_id="m", seq_id=1
        ),
        package.LoadWeightsRequest(model_id="m", seq_id=1, path="tinker://p", optimizer=True),
        package.SaveWeightsForSamplerRequest(model_id="m", sampling_session_seq_id=3),
        package.CreateSessionRequest(tags=["t"], user_metadata={"a": 1}, sdk_version="1"),
        package.SessionSearchRequest(
            owner=package.UserSearchOwner(owner_urns=["u"]),
            statuses=[package.ClientFinishedSessionStatusQuery(reasons=["success"])],
        ),
        package.FuturesRetrieveRequest(
            target=package.SamplingSessionFuturesTarget(sampling_session_id="s")
        ),
        package.CreateCustomLossRequest(
            session_id="s",
            custom_loss_seq_id=0,
            name="n",
            inputs=[package.CustomLossInput(name="logprobs", rank=1)],
            graph=package.CustomLossGraph(
                nodes=[package.CustomLossNode(op="output", name="o", target="output", args=[1])]
            ),
        ),
        package.TelemetrySendRequest(
            events=[
                package.SessionStartEvent(
                    event="SESSION_START",
                    event_id="e",
                    event_session_index=0,
                    severity="INFO",
                    timestamp=WHEN,
                )
            ],
            platform="Linux",
            sdk_version="1",
            session_id="s",
            process_uuid="u",
        ),
    ]


@pytest.mark.parametrize("index", range(len(requests(ours))))
def test_requests_are_encoded_alike_and_decoded_by_both(index: int) -> None:
    theirs, mine = requests(official)[index], requests(ours)[index]
    written = theirs.model_dump(mode="json", exclude_none=True)
    assert mine.model_dump(mode="json", exclude_none=True) == written
    assert type(mine).model_validate(written) == mine
    read = type(theirs).model_validate(mine.model_dump(mode="json", exclude_none=True))
    assert read.model_dump(mode="json", exclude_none=True) == written


# --- tensors -------------------------------------------------------------------------------
def parts(tensor: Any) -> tuple[Any, ...]:
    """Return the JSON that is sent."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.data,
        tensor.sparse_crow_indices,
        tensor.sparse_col_indices,
    )


@st.composite
def matrices(draw: st.DrawFn) -> npt.NDArray[Any]:
    """Generate small matrices that consist mostly of padding."""
    rows, cols = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    cells = st.sampled_from([0, 0, 0, 0, -1, -1, 3, 7])
    numbers = draw(st.lists(cells, min_size=rows * cols, max_size=rows * cols))
    return np.array(numbers, draw(st.sampled_from([np.int64, np.float32]))).reshape(rows, cols)


@settings(deadline=None, max_examples=60)
@given(matrix=matrices(), pad=st.sampled_from([0, -1]))
def test_sparse_tensors_round_trip_alike(matrix: npt.NDArray[Any], pad: int) -> None:
    tensor = torch.from_numpy(matrix)
    mine = ours.TensorData.from_torch_sparse(tensor, pad)
    theirs = official.TensorData.from_torch_sparse(tensor, pad)
    assert parts(mine) == parts(theirs)
    assert mine.tolist(pad) == theirs.tolist(pad) == matrix.tolist()
    assert torch.equal(mine.to_torch(pad), theirs.to_torch(pad))


@pytest.mark.parametrize(
    "loss_fn_inputs",
    [
        {"target_tokens": [1, 2, 3], "weights": [1, 0, 1.5]},
        {"target_tokens": torch.tensor([1, 2, 3]), "advantages": torch.tensor([0.5] * 3)},
        {"target_tokens": torch.eye(20, dtype=torch.int64), "weights": torch.eye(20)},
        {"target_tokens": torch.ones(2, 2, dtype=torch.int64), "logprobs": torch.eye(20)},
        {"logprobs": np.zeros(3), "clip_low_threshold": [[0.5], [1.5]]},
        {"weights": torch.tensor([0.5, 1.5], dtype=torch.bfloat16), "logprobs": []},
        {"target_tokens": torch.tensor([1, 2], dtype=torch.int32), "weights": [True, False]},
    ],
)
def test_loss_inputs_are_converted_alike(loss_fn_inputs: dict[str, Any]) -> None:
    mine = ours.Datum(ours.ModelInput.from_ints([1]), loss_fn_inputs)
    theirs = official.Datum(official.ModelInput.from_ints([1]), loss_fn_inputs)
    for name, tensor in theirs.loss_fn_inputs.items():
        assert parts(mine.loss_fn_inputs[name]) == parts(tensor)


def test_torch_tensors_of_every_dtype_are_accepted() -> None:
    wide = torch.tensor([1.5, -2.0], dtype=torch.bfloat16, requires_grad=True)
    assert ours.TensorData.from_torch(wide).data == [1.5, -2.0]
    assert ours.TensorData.from_torch(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]
    assert ours.TensorData.from_torch(torch.arange(6).reshape(2, 3).T).shape == [3, 2]
    assert ours.TensorData.from_torch(torch.tensor(3)).shape == []
    with pytest.raises(InvalidInput, match="array of bool has no tensor type"):
        ours.TensorData.from_torch(torch.tensor([True]))
    with pytest.raises(InvalidInput, match="takes a torch tensor, got 5"):
        ours.TensorData.from_torch(5)  # type: ignore[arg-type]


def test_nan_in_torch_tensor_is_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"^weights\[1\] is nan"):
        ours.Datum(ours.ModelInput.from_ints([1]), {"weights": torch.tensor([0.0, torch.nan])})


def test_torch_memory_is_shared_but_read_only_memory_is_copied() -> None:
    array = np.zeros(2, np.float32)
    ours.TensorData.from_numpy(array).to_torch()[0] = 5
    assert array[0] == 5
    array.flags.writeable = False
    ours.TensorData.from_numpy(array).to_torch()[0] = 7
    assert array[0] == 5


def test_topk_rows_match() -> None:
    ids = np.array([[3, 0], [0, 0], [1, 2]], np.int32)
    logprobs = np.array([[-1.0, -99999.0], [-99999.0, -99999.0], [-0.5, -0.25]], np.float32)
    theirs = official.SampledSequence(
        "stop", "id", topk_logprobs_np=official.topk_logprobs.TopkLogprobs(ids, logprobs)
    )
    mine = ours.SampledSequence("stop", "id", topk_logprobs_np=ours.TopkLogprobs(ids, logprobs))
    assert mine.topk_logprobs == theirs.topk_logprobs


def test_dmel_lengths_match() -> None:
    for header in (b"\x00\x02\x05\x03", b"\xfe\x07\x01\xac\x02"):
        assert ours.DmelChunk(dmel=header).length == official.DmelChunk(dmel=header).length


@pytest.mark.parametrize(
    "options",
    [
        {"exclude_none": True},
        {"exclude_defaults": True},
        {"include": {"learning_rate"}},
        {"exclude": {"beta1"}, "mode": "json"},
    ],
)
def test_model_dump_matches_official(options: dict[str, Any]) -> None:
    mine = ours.AdamParams(learning_rate=0.5, beta2=0.9)
    theirs = official.AdamParams(learning_rate=0.5, beta2=0.9)
    assert mine.model_dump(**options) == theirs.model_dump(**options)
    assert mine.dict() == theirs.model_dump()
    assert list(ours.AdamParams.model_fields) == list(official.AdamParams.model_fields)
