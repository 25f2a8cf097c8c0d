"""Context and helpers shared by all scenarios."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkex.engine.fake.bigram import Bigram

BASE_MODEL = "tinkex/bigram"
HELLO = list(b"hello hello hello")
#: Only a limit against hanging.
TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioContext:
    """The environment of a scenario: a server, two tenants and an empty directory."""

    url: str
    key: str
    other_key: str
    directory: Path


def datum(sdk: ModuleType, tokens: list[int], **inputs: Any) -> Any:
    """Predict each token from the one before it."""
    given = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    return sdk.Datum(
        model_input=sdk.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **given},
    )


def base_logprobs(tokens: list[int]) -> npt.NDArray[np.float64]:
    """Log-probs of all tokens but the first under the base model, computed from its logits."""
    table = base_table()
    scores: npt.NDArray[np.float64] = table[tokens[:-1], tokens[1:]]
    return scores


@cache
def base_table() -> npt.NDArray[np.float64]:
    """Row: previous token; column: log-probability of the next one."""
    logits = Bigram.base(BASE_MODEL).logits_VV
    table: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return table


def step(sdk: ModuleType, client: Any, tokens: list[int] = HELLO) -> tuple[float, dict[str, float]]:
    """Train one step; return the loss before it and the optimizer's response."""
    passed = client.forward_backward([datum(sdk, tokens)], "cross_entropy")
    moved = client.optim_step(sdk.AdamParams(learning_rate=0.2))
    return passed.result(TIMEOUT_SECONDS).metrics["loss:sum"], dict(
        moved.result(TIMEOUT_SECONDS).metrics
    )


def loss_of(sdk: ModuleType, client: Any, tokens: list[int] = HELLO) -> float:
    """The loss, without a gradient."""
    output = client.forward([datum(sdk, tokens)], "cross_entropy").result(TIMEOUT_SECONDS)
    loss: float = output.metrics["loss:sum"]
    return loss
