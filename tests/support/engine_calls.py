"""Short helpers for calls of an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support.tiny_models import VOCAB_SIZE
from tinkex.engine.protocol import AdapterSpec, Pass
from tinkex.engine.torch_engine import TorchEngine
from tinkex.types import (
    AdamParams,
    Datum,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ModelInput,
)

NAME = "tiny"


def spec(rank: int = 8, seed: int = 1, **options: Any) -> AdapterSpec:
    """An adapter of the tiny model."""
    return AdapterSpec(base_model=NAME, rank=rank, seed=seed, **options)


def datum(seed: int, length: int = 12, **inputs: Any) -> Datum:
    """Random tokens that predict the next one; 40% have a nonzero weight."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, VOCAB_SIZE, length + 1)
    weights = (np.arange(length) >= 0.6 * length).astype(np.float32)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights, **inputs},
    )


def work(*data: Datum, loss: str = "cross_entropy", **config: float) -> ForwardBackwardInput:
    """Examples with a loss."""
    return ForwardBackwardInput(list(data), loss, config or None)


def forward_backward(
    engine: TorchEngine, adapter_id: str, *data: Datum, forward_only: bool = False
) -> ForwardBackwardOutput:
    """Run one pass, which must succeed."""
    each = Pass(adapter_id=adapter_id, request=work(*data), is_forward_only=forward_only)
    (outcome,) = engine.run_passes([each])
    assert isinstance(outcome, ForwardBackwardOutput), outcome
    return outcome


def step(
    engine: TorchEngine, adapter_id: str, rate: float = 1e-2, **params: float
) -> dict[str, float]:
    """One step of the adapter's optimizer."""
    kind = engine._adapters[adapter_id].spec.optimizer["type"]
    make = DimuonParams if kind == "dimuon" else AdamParams
    return dict(engine.optim_step(adapter_id, make(learning_rate=rate, **params)))


def weights(engine: TorchEngine, adapter_id: str) -> torch.Tensor:
    """A copy of an adapter's weights."""
    return engine._adapters[adapter_id].state.weights.clone()
