"""Fixtures and helpers of the fake engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import AdapterSpec, EngineFailure, Pass
from tinkex.types import (
    AdamParams,
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ModelInput,
)

BASE = "tinkex/bigram"
SPEC = AdapterSpec(base_model=BASE, rank=8, seed=1)

Train: TypeAlias = Callable[..., ForwardBackwardOutput | EngineFailure]


def datum(tokens: list[int], targets: list[int], **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": targets, **inputs})


def make_pass(
    adapter_id: str = "a",
    data: list[Datum] | None = None,
    loss_fn: Any = "cross_entropy",
    *,
    is_forward_only: bool = False,
) -> Pass:
    examples = [datum([1, 2, 3], [2, 3, 4])] if data is None else data
    work = ForwardBackwardInput(examples, loss_fn)
    return Pass(adapter_id=adapter_id, request=work, is_forward_only=is_forward_only)


def run(engine: FakeEngine, *args: Any, **kwargs: Any) -> ForwardBackwardOutput:
    [outcome] = engine.run_passes([make_pass(*args, **kwargs)])
    assert isinstance(outcome, ForwardBackwardOutput), outcome
    return outcome


def logprobs(engine: FakeEngine, adapter_id: str = "a") -> list[float]:
    """The adapter's log-probabilities of a few fixed tokens."""
    output = run(engine, adapter_id, is_forward_only=True)
    scores: list[float] = output.loss_fn_outputs[0]["logprobs"].tolist()
    return scores


def train(engine: FakeEngine, adapter_id: str = "a", steps: int = 1) -> None:
    for step in range(steps):
        run(engine, adapter_id, [datum([1, 2, 3 + step], [2, 3, 4])])
        engine.optim_step(adapter_id, AdamParams(learning_rate=0.1, weight_decay=0.01))


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    made.create("a", SPEC)
    return made
