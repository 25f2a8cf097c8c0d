"""Next-token distributions of a bigram model with temperature, top-k and top-p.

Each row is computed once per setting and cached, so that drawing a token costs one random number
and one binary search.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tinkex.engine.fake.bigram import Bigram, Floats, Tokens
from tinkex.types.sampling import TopkLogprobs


class TransitionParams(NamedTuple):
    """The settings of a distribution."""

    temperature: float
    top_k: int
    top_p: float


class TransitionRow(NamedTuple):
    """Candidates for the next token and their cumulative probabilities, up to 1."""

    tokens: Sequence[int]
    cumulative_probs: array[float]


class TransitionTable(dict[int, TransitionRow]):
    """Rows by previous token, computed on first access."""

    def __init__(self, model: Bigram, params: TransitionParams) -> None:
        super().__init__()
        self._model = model
        self._params = params
        is_unscaled = params.temperature in {0.0, 1.0}
        #: The model whose log-probabilities are reported.
        self.scoring_model = model if is_unscaled else model.with_temperature(params.temperature)

    def __missing__(self, previous: int) -> TransitionRow:
        row = self[previous] = build_transition_row(self._model.logprobs_VV[previous], self._params)
        return row


def build_transition_row(logprobs: Floats, params: TransitionParams) -> TransitionRow:
    """Apply temperature, then top-k, then top-p."""
    if params.temperature == 0.0:
        return TransitionRow((int(logprobs.argmax()),), array("d", (1.0,)))
    with np.errstate(over="ignore"):
        scaled = (logprobs - logprobs.max()) / params.temperature
    weights = np.exp(np.maximum(scaled, -700.0))
    if params.top_k < 1 and params.top_p >= 1.0:
        return TransitionRow(range(len(weights)), _cumulative_probs(weights))
    order = np.argsort(-weights, kind="stable")
    if params.top_k >= 1:
        order = order[: params.top_k]
    probs = weights[order] / weights[order].sum()
    # A token is kept if those before it do not reach top_p, so the first is always kept.
    order = order[probs.cumsum() - probs < params.top_p]
    return TransitionRow(order.tolist(), _cumulative_probs(weights[order]))


def _cumulative_probs(weights: Floats) -> array[float]:
    # Searching an array is twice as fast as a list, whose floats are scattered in memory.
    totals = array("d", (weights.cumsum() / weights.sum()).tolist())
    # Rounding must not leave a gap at the end, because a random number may be close to 1.
    totals[-1] = 1.0
    return totals


def find_topk(model: Bigram, previous: Tokens, k: int) -> TopkLogprobs:
    """The k most likely tokens after each of these, most likely first."""
    # Sort each row only once, even if its token occurs several times.
    unique, inverse = np.unique(previous, return_inverse=True)
    logprobs = model.logprobs_VV[unique]
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(logprobs, ids, axis=1)
    return TopkLogprobs(ids.astype(np.int32)[inverse], values.astype(np.float32)[inverse])
