"""Optimizer parameters, LoRA configuration and messages of a training step."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import msgspec
import pytest

from tinkex.errors import InvalidInput
from tinkex.types import (
    AdamOptimizerConfig,
    AdamParams,
    CreateModelRequest,
    DimuonOptimizerConfig,
    DimuonParams,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoraConfig,
    OptimizerConfigBase,
    OptimParamsBase,
    OptimStepRequest,
    TensorData,
    WeightsInfoResponse,
)
from tinkex.types.base import decode_hook, encode_hook


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("learning_rate", math.nan, "is nan; expected a finite number"),
        ("learning_rate", math.inf, "is inf; expected a finite number"),
        ("learning_rate", -1e-5, "is -1e-05; expected at least 0"),
        ("beta1", 1.0, "is 1.0; expected less than 1"),
        ("beta2", -0.1, "is -0.1; expected at least 0"),
        ("eps", 0.0, "is 0.0; expected more than 0"),
        ("weight_decay", -1, "is -1.0; expected at least 0"),
        ("grad_clip_norm", -1, "is -1.0; expected at least 0"),
        ("learning_rate", "1", "is '1'; expected float, got str"),
    ],
)
def test_invalid_adam_params_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"AdamParams.{field} {message}"):
        AdamParams(**{field: value})


def test_adam_accepts_integers_and_zero() -> None:
    params = AdamParams(learning_rate=0, beta1=0, weight_decay=1)
    assert (params.learning_rate, params.weight_decay) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "DimuonParams needs 'learning_rate'"),
        ({"learning_rate": -1}, "learning_rate is -1.0; expected at least 0"),
        ({"learning_rate": 1, "beta1": 1}, "beta1 is 1.0; expected less than 1"),
        ({"learning_rate": 1, "grad_clip_norm": math.nan}, "grad_clip_norm is nan"),
        ({"learning_rate": 1, "damping": 0}, "damping is 0.0; expected more than 0"),
        ({"learning_rate": 1, "rank_lr_correction_exponent": 9}, "expected at most 8"),
    ],
)
def test_invalid_dimuon_params_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        DimuonParams(**wrong)


def test_lora_must_train_something() -> None:
    assert LoraConfig(rank=1, train_mlp=False, train_attn=False).train_unembed
    with pytest.raises(InvalidInput, match="LoraConfig trains nothing"):
        LoraConfig(rank=1, train_mlp=False, train_attn=False, train_unembed=False)


@pytest.mark.parametrize(
    ("params", "key", "wire"),
    [
        (AdamParams(), "adam_params", AdamParams().model_dump()),
        (
            DimuonParams(learning_rate=0.5),
            "optimizer_params",
            {"type": "dimuon", "learning_rate": 0.5, "grad_clip_norm": 0.0, "beta1": 0.9},
        ),
        (OptimParamsBase(type="new", x=[1]), "optimizer_params", {"type": "new", "x": [1]}),
    ],
)
def test_optim_step_uses_the_wire_name_of_its_optimizer(params: Any, key: str, wire: Any) -> None:
    request = OptimStepRequest(optim_params=params, model_id="m", seq_id=3)
    assert request.optim_params == params
    assert request.model_dump(exclude_none=True) == {
        key: wire,
        "model_id": "m",
        "seq_id": 3,
        "type": "optim_step",
    }
    data = msgspec.json.encode(request, enc_hook=encode_hook)
    assert msgspec.json.decode(data, type=OptimStepRequest, dec_hook=decode_hook) == request
    assert pickle.loads(pickle.dumps(request)) == copy.deepcopy(request) == request


def test_optim_step_accepts_wire_names() -> None:
    by_name = OptimStepRequest(adam_params=AdamParams(), model_id="m")  # type: ignore[call-arg]
    assert by_name == OptimStepRequest(optim_params=AdamParams(), model_id="m")
    given = {"optim_params": {"type": "dimuon", "learning_rate": 1}, "model_id": "m"}
    assert OptimStepRequest.model_validate(given).optim_params == DimuonParams(learning_rate=1)


def test_optim_step_needs_exactly_one_optimizer() -> None:
    with pytest.raises(InvalidInput, match="either adam_params or optimizer_params, got None"):
        OptimStepRequest(model_id="m")  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError, match="either adam_params or optimizer_params"):
        msgspec.json.decode(b'{"model_id": "m"}', type=OptimStepRequest, dec_hook=decode_hook)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"type": "dimuon", "learning_rate": -1}, "DimuonParams.learning_rate is -1"),
        ({"type": "dimuon"}, "optimizer_params needs 'learning_rate'"),
        ({"type": "dimuon", "learning_rate": "x"}, "optimizer_params.learning_rate is 'x'"),
        ({"type": 5}, "type is 5; expected a name"),
        ({"rate": 5}, "needs an object with a type"),
        (7, "optimizer_params is 7; expected dict, got int"),
    ],
)
def test_invalid_params_of_known_optimizer_are_refused(params: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        OptimStepRequest.model_validate({"model_id": "m", "optimizer_params": params})


def test_optimizer_configs_of_any_kind_are_decoded() -> None:
    def read(config: dict[str, Any]) -> Any:
        info = {"base_model": "b", "is_lora": True, "optimizer_config": config}
        return WeightsInfoResponse.model_validate(info).optimizer_config

    assert read({"type": "adamw"}) == AdamOptimizerConfig()
    assert read({"type": "dimuon"}) == DimuonOptimizerConfig()
    kept = read({"type": "dimuon", "version": 2, "extra": [1]})
    assert kept == OptimizerConfigBase(type="dimuon", version=2, extra=[1])
    assert (kept.type, kept.version, kept.extra) == ("dimuon", 2, [1])


def test_default_optimizer_is_adamw() -> None:
    request = CreateModelRequest(session_id="s", model_seq_id=0, base_model="b")
    assert request.model_dump()["optimizer_config"] == {"type": "adamw"}
    info = GetInfoResponse.model_validate({"model_data": {}, "model_id": "m"})
    assert info.optimizer_config == AdamOptimizerConfig()


def test_known_config_refuses_unknown_fields() -> None:
    with pytest.raises(InvalidInput, match="AdamOptimizerConfig has no field 'version'"):
        AdamOptimizerConfig(version=1)
    with pytest.raises(InvalidInput, match="version is 2; expected 1"):
        DimuonOptimizerConfig(version=2)  # type: ignore[arg-type]


def test_open_records_are_frozen_values() -> None:
    record = OptimizerConfigBase(type="new", x=1)
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record
    assert record != OptimParamsBase(type="new", x=1)
    assert record != {"type": "new", "x": 1}
    assert record.model_dump() == {"type": "new", "x": 1}
    assert OptimizerConfigBase.from_wire({"type": "new", "self": 1}).self == 1
    assert OptimizerConfigBase(type="new", x=None).model_dump(exclude_none=True) == {"type": "new"}
    assert repr(record) == "OptimizerConfigBase(type='new', x=1)"
    with pytest.raises(AttributeError, match="frozen"):
        record.x = 2
    with pytest.raises(AttributeError, match="has no field 'y'"):
        _ = record.y


def test_outputs_round_trip_through_json() -> None:
    logprobs = TensorData([-0.5, math.nan], "float32")
    output = ForwardBackwardOutput("ArrayRecord", [{"logprobs": logprobs}], {"loss:sum": 1.5})
    data = msgspec.json.encode(output, enc_hook=encode_hook)
    assert msgspec.json.decode(data, type=ForwardBackwardOutput, dec_hook=decode_hook) == output
    assert ForwardBackwardOutput("X", []).metrics == {}
