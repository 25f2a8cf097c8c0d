"""Adapters and training in the fake engine."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.fake.conftest import BASE, SPEC, datum, logprobs, make_pass, run, train
from tinkex.engine.fake.bigram import Bigram
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.losses import LOSSES
from tinkex.engine.protocol import Engine, EngineFailure, Pass
from tinkex.errors import InvalidInput, RequestErrorCategory
from tinkex.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ImageChunk,
    ModelInput,
)
from tinkex.types.optimizers import DimuonParams, OptimParamsBase


def test_fake_engine_implements_protocol() -> None:
    engine: Engine = FakeEngine(("one", "two"))
    assert [model.name for model in engine.base_models()] == ["one", "two"]
    assert {model.max_context_tokens for model in engine.base_models()} == {32768}


# --- adapters ------------------------------------------------------------------------------------


def test_new_adapter_does_not_change_logprobs(engine: FakeEngine) -> None:
    engine.create("b", replace(SPEC, rank=1, seed=99))
    expected = Bigram.base(BASE).logprobs_VV[[1, 2, 3], [2, 3, 4]].astype(np.float32).tolist()
    assert logprobs(engine, "a") == logprobs(engine, "b") == expected


def test_create_and_drop_adapters(engine: FakeEngine) -> None:
    assert engine.has_adapter("a")
    engine.drop("a")
    engine.drop("a")
    assert not engine.has_adapter("a")


def test_recreated_adapter_is_reset(engine: FakeEngine) -> None:
    before = logprobs(engine)
    train(engine)
    assert logprobs(engine) != before
    engine.create("a", SPEC)
    assert logprobs(engine) == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_model": "unknown/none"}, "base model 'unknown/none' is not one of tinkex/bigram"),
        ({"rank": 0}, "rank is 0"),
        ({"train_unembed": False, "train_mlp": False, "train_attn": False}, "nothing to train"),
        ({"optimizer": {"type": "sgd"}}, "optimizer type 'sgd' is not one of adamw, dimuon"),
    ],
)
def test_invalid_adapter_spec_is_rejected(
    engine: FakeEngine, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        engine.create("b", replace(SPEC, **change))
    assert not engine.has_adapter("b")


# --- passes --------------------------------------------------------------------------------------


def test_forward_leaves_no_gradient(engine: FakeEngine) -> None:
    run(engine, is_forward_only=True)
    assert engine.optim_step("a", AdamParams())["has_gradient"] == 0.0


def test_pass_returns_loss_tokens_and_entropy(engine: FakeEngine) -> None:
    metrics = run(engine).metrics
    assert metrics.keys() == {"loss:sum", "tokens:sum", "entropy:mean"}
    assert metrics["loss:sum"] == pytest.approx(-sum(logprobs(engine)))
    assert metrics["tokens:sum"] == 3.0
    assert 0.0 < metrics["entropy:mean"] < np.log(512)


def test_two_passes_equal_one_combined_pass(engine: FakeEngine) -> None:
    engine.create("b", SPEC)
    one, two = datum([1, 2], [2, 3]), datum([2, 5], [3, 6])
    for example in (one, two):
        run(engine, "a", [example])
    run(engine, "b", [one, two])
    metrics = [engine.optim_step(each, AdamParams(learning_rate=0.1)) for each in "ab"]
    assert metrics[0] == pytest.approx(metrics[1])
    assert logprobs(engine, "a") == pytest.approx(logprobs(engine, "b"), rel=1e-6)


def test_training_is_batch_invariant() -> None:
    alone, busy = FakeEngine(), FakeEngine()
    for engine in (alone, busy):
        engine.create("a", SPEC)
    busy.create("b", SPEC)
    for _ in range(3):
        [mine] = alone.run_passes([make_pass("a")])
        others = busy.run_passes(
            [make_pass("b"), make_pass("a"), make_pass("b", [datum([9], [9])])]
        )
        assert isinstance(mine, ForwardBackwardOutput)
        assert others[1] == mine
        params = AdamParams(learning_rate=0.1)
        assert busy.optim_step("a", params) == alone.optim_step("a", params)
        busy.optim_step("b", params)
    assert logprobs(busy) == logprobs(alone)


def picture() -> Datum:
    chunk = ImageChunk(data=b"png", format="png", expected_tokens=1)
    mixed = ModelInput(chunks=[EncodedTextChunk(tokens=[1]), chunk])
    return Datum(mixed, {"target_tokens": [1, 2]})


@pytest.mark.parametrize(
    ("data", "loss_fn", "reason"),
    [
        (None, "mse", "loss_fn 'mse' is not one of"),
        (None, "custom", "loss_fn 'custom' takes one setting, the loss_id"),
        (None, "stable_reinforce", "does not record them while it samples"),
        (None, "ppo", "example 0 needs logprobs of shape"),
        ([], "cross_entropy", "data is empty"),
        ([datum([1], [512])], "cross_entropy", "target_tokens of example 0 has token 512"),
        ([datum([1], [2]), datum([513], [2])], "cross_entropy", "input of example 1 has token 513"),
        ([datum([1], [2], weights=[1.0, 2.0])], "cross_entropy", "got shape [2]"),
        ([datum([1] * 32769, [2] * 32769)], "cross_entropy", "example 0 has 32769 tokens"),
        ([picture()], "cross_entropy", "example 0 has a chunk of type 'image'"),
        (
            [datum([1], [2], logprobs=[-1e4], advantages=[1.0])],
            "importance_sampling",
            "the importance_sampling loss is -inf",
        ),
    ],
)
def test_rejected_pass_names_value_and_adds_nothing(
    engine: FakeEngine, data: list[Datum] | None, loss_fn: str, reason: str
) -> None:
    outcomes = engine.run_passes(
        [make_pass("a", data, loss_fn), make_pass("a", is_forward_only=True)]
    )
    failure, fine = outcomes
    assert isinstance(failure, EngineFailure)
    assert reason in failure.message
    assert failure.category is RequestErrorCategory.User
    assert isinstance(fine, ForwardBackwardOutput)
    assert engine.optim_step("a", AdamParams())["has_gradient"] == 0.0


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
settings_of_a_loss = st.dictionaries(
    st.sampled_from(["beta", "clip_low_threshold", "clip_high_threshold", "unknown"]),
    st.floats() | st.text(max_size=3),
)


@settings(deadline=None)
@given(data=st.data(), config=settings_of_a_loss)
def test_any_values_are_trained_or_rejected(
    data: st.DataObject, config: dict[str, float | str]
) -> None:
    engine = FakeEngine()
    engine.create("a", SPEC)
    tokens = data.draw(st.lists(st.integers(0, 520), min_size=1, max_size=4))
    names = ("logprobs", "advantages", "weights", "clip_low_threshold", "sequence_ratio_mask")
    inputs = {
        name: data.draw(st.lists(numbers, min_size=len(tokens), max_size=len(tokens)))
        for name in data.draw(st.sets(st.sampled_from(names)))
    }
    loss_fn: Any = data.draw(st.sampled_from(list(LOSSES)))
    work = ForwardBackwardInput([datum(tokens, tokens, **inputs)], loss_fn, config)
    [outcome] = engine.run_passes([Pass(adapter_id="a", request=work)])
    if isinstance(outcome, ForwardBackwardOutput):
        assert np.isfinite(list(outcome.metrics.values())).all()
    params = AdamParams(learning_rate=data.draw(st.floats(0, 1e300)))
    try:
        metrics = engine.optim_step("a", params)
    except InvalidInput:
        metrics = {}
    assert np.isfinite(list(metrics.values())).all()
    assert np.isfinite(logprobs(engine)).all()


def test_missing_adapter_is_a_server_error(engine: FakeEngine) -> None:
    [failure] = engine.run_passes([make_pass("gone")])
    assert failure == EngineFailure("adapter 'gone' is not in memory", RequestErrorCategory.Server)
    with pytest.raises(LookupError, match="adapter 'gone' is not in memory"):
        engine.optim_step("gone", AdamParams())


# --- steps ---------------------------------------------------------------------------------------


def test_optim_step_returns_its_metrics(engine: FakeEngine) -> None:
    run(engine)
    metrics = engine.optim_step("a", AdamParams(learning_rate=0.25))
    assert metrics.keys() == {
        "grad_norm",
        "learning_rate",
        "param_norm",
        "update_norm",
        "step",
        "has_gradient",
    }
    assert (metrics["learning_rate"], metrics["step"], metrics["has_gradient"]) == (0.25, 1.0, 1.0)
    assert metrics["grad_norm"] > 0.0
    assert metrics["update_norm"] > 0.0


def test_step_clears_gradient(engine: FakeEngine) -> None:
    train(engine)
    metrics = engine.optim_step("a", AdamParams())
    assert (metrics["grad_norm"], metrics["has_gradient"], metrics["step"]) == (0.0, 0.0, 2.0)


def test_training_increases_target_probability(engine: FakeEngine) -> None:
    before = sum(logprobs(engine))
    train(engine, steps=5)
    assert sum(logprobs(engine)) > before + 1.0


def test_dimuon_step_changes_weights(engine: FakeEngine) -> None:
    engine.create("b", replace(SPEC, optimizer={"type": "dimuon", "version": 1}))
    before = sum(logprobs(engine, "b"))
    run(engine, "b")
    engine.optim_step("b", DimuonParams(learning_rate=0.1))
    assert sum(logprobs(engine, "b")) > before


@pytest.mark.parametrize(
    ("optimizer", "params", "reason"),
    [
        ("adamw", DimuonParams(learning_rate=0.1), "parameters of 'dimuon', but .* with 'adamw'"),
        ("dimuon", AdamParams(), "parameters of 'adamw', but .* with 'dimuon'"),
        ("adamw", OptimParamsBase(type="lion"), "parameters of 'lion', but .* with 'adamw'"),
        (
            "adamw",
            OptimParamsBase(type="adamw"),
            "type 'adamw' are not supported; send adam_params",
        ),
    ],
)
def test_step_with_other_optimizer_is_rejected(
    engine: FakeEngine, optimizer: str, params: Any, reason: str
) -> None:
    engine.create("b", replace(SPEC, optimizer={"type": optimizer}))
    with pytest.raises(InvalidInput, match=reason):
        engine.optim_step("b", params)


def test_overflowing_step_can_be_retried(engine: FakeEngine) -> None:
    run(engine)
    before = logprobs(engine)
    with pytest.raises(InvalidInput, match=r"learning_rate 1e\+200 .* nothing was changed"):
        engine.optim_step("a", AdamParams(learning_rate=1e200))
    assert logprobs(engine) == before
    metrics = engine.optim_step("a", AdamParams(learning_rate=0.1))
    assert (metrics["step"], metrics["has_gradient"]) == (1.0, 1.0)


# --- time ----------------------------------------------------------------------------------------


def test_seconds_per_op_delays_passes_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda _, seconds: slept.append(seconds))
    engine = FakeEngine(seconds_per_op=0.5)
    engine.create("a", SPEC)
    engine.run_passes([make_pass(), make_pass()])
    engine.optim_step("a", AdamParams())
    assert slept == [0.5, 0.5, 0.5]


def test_close_releases_everything(engine: FakeEngine) -> None:
    engine.close()
    assert not engine.has_adapter("a")
    assert engine.num_samples == 0


def test_interrupt_ends_the_waits() -> None:
    engine = FakeEngine(seconds_per_op=3600.0)
    engine.create("a", SPEC)
    engine.interrupt()
    assert engine.optim_step("a", AdamParams())["step"] == 1.0
