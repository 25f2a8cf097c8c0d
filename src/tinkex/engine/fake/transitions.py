"""Where a token of a bigram model may lead, under a setting of temperature, top-k and top-p.

A row is worked out once per setting and kept, so that a token costs one dice throw and one search
in a sorted list.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tinkex.engine.fake.bigram import Bigram, Floats, Tokens
from tinkex.types.sampling import TopkLogprobs


class TransitionParams(NamedTuple):
    """What shapes a distribution."""

    temperature: float
    top_k: int
    top_p: float


class TransitionRow(NamedTuple):
    """Where a token may lead: candidates, and their running total of probability, up to 1."""

    tokens: Sequence[int]
    cumulative_probs: array[float]


class TransitionTable(dict[int, TransitionRow]):
    """Rows by previous token, worked out when first asked for."""

    def __init__(self, model: Bigram, params: TransitionParams) -> None:
        super().__init__()
        self._model = model
        self._params = params
        is_as_it_is = params.temperature in {0.0, 1.0}
        #: Whose log-probabilities are reported.
        self.scoring_model = model if is_as_it_is else model.with_temperature(params.temperature)

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
    kept = weights[order] / weights[order].sum()
    # A token is kept if those before it do not reach top_p, so the first always is.
    order = order[kept.cumsum() - kept < params.top_p]
    return TransitionRow(order.tolist(), _cumulative_probs(weights[order]))


def _cumulative_probs(weights: Floats) -> array[float]:
    # An array is half as slow to search as a list, whose numbers lie all over the memory.
    totals = array("d", (weights.cumsum() / weights.sum()).tolist())
    # Rounding must leave no gap above the last one, for a throw may come close to 1.
    totals[-1] = 1.0
    return totals


def find_topk(model: Bigram, previous: Tokens, k: int) -> TopkLogprobs:
    """The k likeliest tokens after each of these, the likeliest first."""
    # Every row is sorted once, however often its token occurs.
    seen, places = np.unique(previous, return_inverse=True)
    logprobs = model.logprobs_VV[seen]
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(logprobs, ids, axis=1)
    return TopkLogprobs(ids.astype(np.int32)[places], values.astype(np.float32)[places])
