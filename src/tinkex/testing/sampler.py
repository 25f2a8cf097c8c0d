"""Draws text from a bigram model, and answers what a sampling request asks about its prompt.

A row's distribution is worked out once per setting and kept, so that a token costs one dice throw
and one search in a sorted list.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np  # noqa: TID253 - this file is numpy, and nothing light imports it
import numpy.typing as npt  # noqa: TID253 - as above

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

Stops: TypeAlias = Callable[[list[int]], bool]


class Setting(NamedTuple):
    """What shapes a distribution."""

    temperature: float
    top_k: int
    top_p: float


class Row(NamedTuple):
    """Where a token may lead: candidates, and their running total of probability."""

    tokens: Sequence[int]
    totals: Sequence[float]


class Sampler:
    """One model, ready to be sampled from many times."""

    def __init__(self, model: Bigram) -> None:
        self.model = model
        self._rows: dict[Setting, dict[int, Row]] = {}

    def sample(self, request: SampleRequest, dice: random.Random) -> SampleResponse:
        """Everything the request asks for; ValueError if it asks for what cannot be."""
        params = request.sampling_params
        prompt = read_tokens(request.prompt)
        _check(request, prompt)
        tokens = check_tokens("the prompt", prompt, self.model.vocab_size)
        if params.seed is not None:
            dice = random.Random(params.seed)
        max_tokens = params.max_tokens or DEFAULT_MAX_TOKENS
        rows, stops = self._rows_for(params), stops_of(params)
        sequences = [
            self._sequence(prompt[-1], rows, stops, max_tokens, dice, request.topk_sample_logprobs)
            for _ in range(request.num_samples)
        ]
        first = _first_scored(request, len(prompt))
        asks_topk = request.topk_prompt_logprobs > 0
        return SampleResponse(
            sequences=sequences,
            prompt_logprobs_np=self._prompt_logprobs(tokens, first)
            if request.prompt_logprobs
            else None,
            topk_prompt_logprobs_np=self._prompt_topk(tokens, first, request.topk_prompt_logprobs)
            if asks_topk
            else None,
            target_prompt_logprobs=self._targets(tokens, request.target_prompt_logprobs),
            prompt_alt_tokens=self._alternatives(tokens, request, dice),
        )

    def _sequence(
        self,
        previous: int,
        rows: dict[int, Row],
        stops: Stops,
        max_tokens: int,
        dice: random.Random,
        num_topk: int,
    ) -> SampledSequence:
        first, score = previous, self.model.logprobs_VV.item
        tokens: list[int] = []
        logprobs: list[float] = []
        reason: StopReason = "length"
        while len(tokens) < max_tokens:
            token = _draw(rows[previous], dice)
            tokens.append(token)
            logprobs.append(score(previous, token))
            previous = token
            if stops(tokens):
                reason = "stop"
                break
        topk = self._topk(np.array([first, *tokens[:-1]]), num_topk) if num_topk > 0 else None
        return SampledSequence(
            reason,
            "",
            np.array(tokens, dtype=np.int32),
            np.array(logprobs, dtype=np.float32),
            topk,
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
        drawn = [[_draw(rows[token], dice) for _ in range(k)] for token in previous.tolist()]
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
        return Row((int(logprobs.argmax()),), (1.0,))
    scaled = (logprobs - logprobs.max()) / setting.temperature
    weights = np.exp(np.maximum(scaled, -700.0))
    if setting.top_k < 1 and setting.top_p >= 1.0:
        return Row(range(len(weights)), list(accumulate(weights.tolist())))
    order = np.argsort(-weights, kind="stable")
    if setting.top_k >= 1:
        order = order[: setting.top_k]
    kept = weights[order] / weights[order].sum()
    # A token is kept if those before it do not reach top_p, so the first always is.
    order = order[kept.cumsum() - kept < setting.top_p]
    return Row(order.tolist(), list(accumulate(weights[order].tolist())))


def _draw(row: Row, dice: random.Random) -> int:
    totals = row.totals
    index = bisect_right(totals, dice.random() * totals[-1])
    return row.tokens[min(index, len(totals) - 1)]


def stops_of(params: SamplingParams) -> Stops:
    """Whether the tokens so far end a sample; a stop that is given replaces the end token."""
    stop = params.stop
    if stop is None:
        return lambda tokens: tokens[-1] == EOS_TOKEN
    given = [stop] if isinstance(stop, str) else list(stop)
    texts = tuple(text.encode() for text in given if isinstance(text, str))
    ids = frozenset(token for token in given if isinstance(token, int))
    if texts:
        longest = max(map(len, texts))
        return lambda tokens: b"".join(map(token_bytes, tokens[-longest:])).endswith(texts)
    return lambda tokens: tokens[-1] in ids


def _check(request: SampleRequest, prompt: list[int]) -> None:
    if not prompt:
        raise ValueError("the prompt is empty")
    if request.num_samples < 1:
        raise ValueError(f"num_samples is {request.num_samples}, expected at least 1")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n < len(prompt):
        raise ValueError(
            f"prompt_logprobs_last_n is {last_n}, expected 1 to {len(prompt) - 1} for this prompt"
        )


def _first_scored(request: SampleRequest, num_tokens: int) -> int:
    """The first prompt position that gets scores; position 0 never does."""
    last_n = request.prompt_logprobs_last_n
    return 1 if last_n is None else num_tokens - last_n
