"""Draws text from a bigram model, and answers what a sampling request asks about its prompt.

A row's distribution is worked out once per setting and kept, so that a token costs one dice throw
and one search in a sorted list.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tinkex.testing.batches import read_tokens, score_pairs
from tinkex.testing.bigram import Bigram, Floats, Tokens, check_tokens
from tinkex.testing.toy_tokenizer import EOS_TOKEN, token_bytes
from tinkex.types import (
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from tinkex.types.sampling import FILLER_LOGPROB, StopReason, TopkLogprobs

#: How far a sample runs when the request does not say.
DEFAULT_MAX_TOKENS = 128
_MAX_SETTINGS = 8


class Setting(NamedTuple):
    """What shapes a distribution."""

    temperature: float
    top_k: int
    top_p: float


class Row(NamedTuple):
    """Where a token may lead: candidates, and their running total of probability, up to 1."""

    tokens: Sequence[int]
    totals: array[float]


class Stops(NamedTuple):
    """What ends a sample: a token, or a text at the end of what was drawn."""

    tokens: frozenset[int]
    texts: tuple[bytes, ...] = ()


_AT_THE_END = Stops(frozenset({EOS_TOKEN}))


class Draw(NamedTuple):
    """How one sequence is drawn."""

    rows: dict[int, Row]
    stops: Stops
    max_tokens: int


class Sampler:
    """One model, ready to be sampled from many times."""

    def __init__(self, model: Bigram) -> None:
        self.model = model
        self._rows: dict[Setting, dict[int, Row]] = {}

    def sample(self, request: SampleRequest, dice: random.Random) -> SampleResponse:
        """Everything the request asks for; ValueError if it asks for what cannot be."""
        params = request.sampling_params
        prompt = read_tokens(request.prompt)
        self._check(request, prompt)
        if params.seed is not None:
            dice = random.Random(params.seed)
        draw = Draw(
            self._rows_for(params), read_stops(params), params.max_tokens or DEFAULT_MAX_TOKENS
        )
        sequences = [
            self._sequence(prompt[-1], draw, dice, request.topk_sample_logprobs)
            for _ in range(request.num_samples)
        ]
        if not _asks_about_prompt(request):
            return SampleResponse(sequences)
        return self._with_prompt(request, sequences, np.array(prompt), dice)

    def _check(self, request: SampleRequest, prompt: list[int]) -> None:
        if not prompt:
            raise ValueError("the prompt is empty")
        if request.num_samples < 1:
            raise ValueError(f"num_samples is {request.num_samples}, expected at least 1")
        if max(prompt) >= self.model.vocab_size or min(prompt) < 0:
            check_tokens("the prompt", prompt, self.model.vocab_size)
        last_n = request.prompt_logprobs_last_n
        if last_n is not None and not 1 <= last_n < len(prompt):
            raise ValueError(
                f"prompt_logprobs_last_n is {last_n}, expected 1 to {len(prompt) - 1} here"
            )

    def _sequence(
        self, previous: int, draw: Draw, dice: random.Random, num_topk: int
    ) -> SampledSequence:
        # Local names: this loop is most of what a sample costs.
        rows, (stop_tokens, stop_texts), max_tokens = draw
        throw = dice.random
        path = [previous]
        reason: StopReason = "length"
        for _ in range(max_tokens):
            candidates, totals = rows[previous]
            previous = candidates[bisect_right(totals, throw())]
            path.append(previous)
            if previous in stop_tokens or (stop_texts and ends_with(path[1:], stop_texts)):
                reason = "stop"
                break
        tokens = np.array(path)
        logprobs = score_pairs(self.model, tokens).astype(np.float32)
        topk = self._topk(tokens[:-1], num_topk) if num_topk > 0 else None
        return SampledSequence(reason, "", tokens[1:].astype(np.int32), logprobs, topk)

    def _with_prompt(
        self,
        request: SampleRequest,
        sequences: list[SampledSequence],
        tokens: Tokens,
        dice: random.Random,
    ) -> SampleResponse:
        last_n, k = request.prompt_logprobs_last_n, request.topk_prompt_logprobs
        # The first position has nothing before it and is never scored.
        first = 1 if last_n is None else len(tokens) - last_n
        return SampleResponse(
            sequences,
            self._prompt_logprobs(tokens, first) if request.prompt_logprobs else None,
            self._prompt_topk(tokens, first, k) if k > 0 else None,
            target_prompt_logprobs=self._targets(tokens, request.target_prompt_logprobs),
            prompt_alt_tokens=self._alternatives(tokens, request, dice),
        )

    def _rows_for(self, params: SamplingParams) -> dict[int, Row]:
        setting = Setting(params.temperature, params.top_k, params.top_p)
        rows = self._rows.get(setting)
        if rows is None:
            if len(self._rows) >= _MAX_SETTINGS:
                self._rows.clear()
            rows = self._rows[setting] = _Rows(self.model, setting)
        return rows

    def _topk(self, previous: Tokens, k: int) -> TopkLogprobs:
        logprobs = self.model.logprobs_VV[previous]
        ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
        values = np.take_along_axis(logprobs, ids, axis=1)
        return TopkLogprobs(ids.astype(np.int32), values.astype(np.float32))

    def _prompt_logprobs(self, tokens: Tokens, first: int) -> npt.NDArray[np.float32]:
        scores = np.full(len(tokens), np.nan, dtype=np.float32)
        scores[first:] = score_pairs(self.model, tokens)[first - 1 :]
        return scores

    def _prompt_topk(self, tokens: Tokens, first: int, k: int) -> TopkLogprobs:
        scored = self._topk(tokens[first - 1 : -1], k)
        ids = np.zeros((len(tokens), scored.token_ids.shape[1]), dtype=np.int32)
        logprobs = np.full(ids.shape, FILLER_LOGPROB, dtype=np.float32)
        ids[first:], logprobs[first:] = scored.token_ids, scored.logprobs
        return TopkLogprobs(ids, logprobs)

    def _targets(self, tokens: Tokens, wanted: TensorData | None) -> TensorData | None:
        if wanted is None:
            return None
        if len(wanted.shape) != 2 or wanted.shape[0] != len(tokens) - 1:
            raise ValueError(
                f"target_prompt_logprobs has shape {wanted.shape}, "
                f"expected {len(tokens) - 1} rows for {len(tokens)} prompt tokens"
            )
        cells, crow = wanted.array, wanted.crow_array
        per_row = wanted.shape[1] if crow is None else np.diff(crow)
        previous = np.repeat(tokens[:-1], per_row)
        flat = cells.ravel()
        ids = check_tokens("target_prompt_logprobs", np.maximum(flat, 0), self.model.vocab_size)
        scores = np.where(flat < 0, 0.0, self.model.logprobs_VV[previous, ids])
        values = scores.astype(np.float32).reshape(cells.shape)
        return TensorData(values, "float32", wanted.shape, crow, wanted.col_array)

    def _alternatives(
        self, tokens: Tokens, request: SampleRequest, dice: random.Random
    ) -> PromptAltTokens | None:
        k = request.prompt_alt_tokens_k
        if k <= 0:
            return None
        setting = Setting(request.sampling_params.temperature, -1, 1.0)
        rows = _Rows(self.model, setting)
        previous = tokens[:-1]
        drawn = [
            [candidates[bisect_right(totals, dice.random())] for _ in range(k)]
            for candidates, totals in (rows[token] for token in previous.tolist())
        ]
        ids = np.array(drawn, dtype=np.int64).reshape(len(previous), k)
        logprobs = self.model.logprobs_VV[previous[:, None], ids].astype(np.float32)
        return PromptAltTokens(TensorData.from_numpy(ids), TensorData.from_numpy(logprobs))


class _Rows(dict[int, Row]):
    """Rows by previous token, worked out when first asked for."""

    def __init__(self, model: Bigram, setting: Setting) -> None:
        super().__init__()
        self._model = model
        self._setting = setting

    def __missing__(self, previous: int) -> Row:
        row = self[previous] = shape_row(self._model.logprobs_VV[previous], self._setting)
        return row


def shape_row(logprobs: Floats, setting: Setting) -> Row:
    """Apply temperature, then top-k, then top-p."""
    if setting.temperature == 0.0:
        return Row((int(logprobs.argmax()),), array("d", (1.0,)))
    scaled = (logprobs - logprobs.max()) / setting.temperature
    weights = np.exp(np.maximum(scaled, -700.0))
    if setting.top_k < 1 and setting.top_p >= 1.0:
        return Row(range(len(weights)), _running_total(weights))
    order = np.argsort(-weights, kind="stable")
    if setting.top_k >= 1:
        order = order[: setting.top_k]
    kept = weights[order] / weights[order].sum()
    # A token is kept if those before it do not reach top_p, so the first always is.
    order = order[kept.cumsum() - kept < setting.top_p]
    return Row(order.tolist(), _running_total(weights[order]))


def _running_total(weights: Floats) -> array[float]:
    # An array is half as slow to search as a list, whose numbers lie all over the memory.
    totals = array("d", (weights.cumsum() / weights.sum()).tolist())
    # Rounding must leave no gap above the last one, for a throw may come close to 1.
    totals[-1] = 1.0
    return totals


def read_stops(params: SamplingParams) -> Stops:
    """Where a sample ends; a stop that is given replaces the end token."""
    stop = params.stop
    if stop is None:
        return _AT_THE_END
    given = [stop] if isinstance(stop, str) else list(stop)
    return Stops(
        frozenset(token for token in given if isinstance(token, int)),
        tuple(text.encode() for text in given if isinstance(text, str)),
    )


def ends_with(tokens: list[int], texts: tuple[bytes, ...]) -> bool:
    """Whether the tokens' text ends with one of these; a token is at most one byte."""
    longest = max(map(len, texts))
    return b"".join(map(token_bytes, tokens[-longest:])).endswith(texts)


def _asks_about_prompt(request: SampleRequest) -> bool:
    return (
        bool(request.prompt_logprobs)
        or request.topk_prompt_logprobs > 0
        or request.target_prompt_logprobs is not None
        or request.prompt_alt_tokens_k > 0
    )
