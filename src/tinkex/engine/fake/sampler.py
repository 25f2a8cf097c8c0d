"""Draws text from a bigram model, and answers what a sampling request asks about its prompt.

Log-probabilities of what is drawn are those of the tempered distribution, before top-k and top-p
cut it; those of the prompt, and of greedy draws, are the model's own. Sample j of seed s depends on
the weights, the last prompt token, s and j, and on nothing else.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tinkex.engine.examples import check_tokens
from tinkex.engine.fake.bigram import Bigram, Tokens
from tinkex.engine.fake.scoring import flatten_tokens, score_tokens
from tinkex.engine.fake.toy_tokenizer import EOS_TOKEN, token_bytes
from tinkex.engine.fake.transitions import TransitionParams, TransitionTable, find_topk
from tinkex.errors import InvalidInput
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
_MAX_TABLES = 8


class ByteStopConditions(NamedTuple):
    """What ends a sample: a token, or a text at the end of what was drawn."""

    tokens: frozenset[int]
    texts: tuple[bytes, ...] = ()


_STOP_AT_EOS = ByteStopConditions(frozenset({EOS_TOKEN}))


class GenerationSpec(NamedTuple):
    """How the sequences of a request are drawn."""

    transitions: TransitionTable
    stops: ByteStopConditions
    max_tokens: int
    num_topk: int


class BigramSampler:
    """One model, ready to be sampled from many times."""

    def __init__(self, model: Bigram) -> None:
        self.model = model
        self._tables: dict[TransitionParams, TransitionTable] = {}

    def sample(self, request: SampleRequest, rng: random.Random) -> SampleResponse:
        """Everything the request asks for; `dice` give a seed to a request that has none."""
        steps = self.start(request, rng)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                response: SampleResponse = end.value
                return response

    def start(
        self, request: SampleRequest, rng: random.Random
    ) -> Generator[None, None, SampleResponse]:
        """Answer a request in steps of one sequence; InvalidInput if it asks for what cannot be."""
        params = request.sampling_params
        prompt = flatten_tokens(request.prompt)
        self._check_request(request, prompt)
        seed = params.seed if params.seed is not None else rng.getrandbits(64)
        draw = GenerationSpec(
            self._get_table(params),
            parse_stop(params),
            params.max_tokens or DEFAULT_MAX_TOKENS,
            request.topk_sample_logprobs,
        )
        sequences = []
        for index in range(request.num_samples):
            sequences.append(generate_sequence(prompt[-1], draw, seeded_rng(seed, index)))
            yield
        if not _has_prompt_queries(request):
            return SampleResponse(sequences)
        return self._add_prompt_results(
            request, sequences, np.array(prompt), seeded_rng(seed, "prompt")
        )

    def _check_request(self, request: SampleRequest, prompt: list[int]) -> None:
        if not prompt:
            raise InvalidInput("the prompt is empty")
        if request.num_samples < 1:
            raise InvalidInput(f"num_samples is {request.num_samples}, expected at least 1")
        if max(prompt) >= self.model.vocab_size or min(prompt) < 0:
            check_tokens("the prompt", prompt, self.model.vocab_size)
        last_n = request.prompt_logprobs_last_n
        if last_n is not None and not 1 <= last_n < len(prompt):
            raise InvalidInput(
                f"prompt_logprobs_last_n is {last_n}, expected 1 to {len(prompt) - 1} here"
            )

    def _add_prompt_results(
        self,
        request: SampleRequest,
        sequences: list[SampledSequence],
        tokens: Tokens,
        rng: random.Random,
    ) -> SampleResponse:
        last_n, k = request.prompt_logprobs_last_n, request.topk_prompt_logprobs
        # The first position has nothing before it and is never scored.
        first = 1 if last_n is None else len(tokens) - last_n
        return SampleResponse(
            sequences,
            self._prompt_logprobs(tokens, first) if request.prompt_logprobs else None,
            self._prompt_topk(tokens, first, k) if k > 0 else None,
            target_prompt_logprobs=self._target_logprobs(tokens, request.target_prompt_logprobs),
            prompt_alt_tokens=self._draw_alternatives(tokens, request, rng),
        )

    def _get_table(self, params: SamplingParams) -> TransitionTable:
        setting = TransitionParams(params.temperature, params.top_k, params.top_p)
        rows = self._tables.get(setting)
        if rows is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            rows = self._tables[setting] = TransitionTable(self.model, setting)
        return rows

    def _prompt_logprobs(self, tokens: Tokens, first: int) -> npt.NDArray[np.float32]:
        scores = np.full(len(tokens), np.nan, dtype=np.float32)
        scores[first:] = score_tokens(self.model, tokens)[first - 1 :]
        return scores

    def _prompt_topk(self, tokens: Tokens, first: int, k: int) -> TopkLogprobs:
        scored = find_topk(self.model, tokens[first - 1 : -1], k)
        ids = np.zeros((len(tokens), scored.token_ids.shape[1]), dtype=np.int32)
        logprobs = np.full(ids.shape, FILLER_LOGPROB, dtype=np.float32)
        ids[first:], logprobs[first:] = scored.token_ids, scored.logprobs
        return TopkLogprobs(ids, logprobs)

    def _target_logprobs(self, tokens: Tokens, targets: TensorData | None) -> TensorData | None:
        if targets is None:
            return None
        if len(targets.shape) != 2 or targets.shape[0] != len(tokens) - 1:
            raise InvalidInput(
                f"target_prompt_logprobs has shape {targets.shape}, "
                f"expected {len(tokens) - 1} rows for {len(tokens)} prompt tokens"
            )
        cells, crow = targets.array, targets.crow_array
        per_row = targets.shape[1] if crow is None else np.diff(crow)
        previous = np.repeat(tokens[:-1], per_row)
        flat = cells.ravel()
        ids = check_tokens("target_prompt_logprobs", np.maximum(flat, 0), self.model.vocab_size)
        scores = np.where(flat < 0, 0.0, self.model.logprobs_VV[previous, ids])
        values = scores.astype(np.float32).reshape(cells.shape)
        return TensorData(values, "float32", targets.shape, crow, targets.col_array)

    def _draw_alternatives(
        self, tokens: Tokens, request: SampleRequest, rng: random.Random
    ) -> PromptAltTokens | None:
        k = request.prompt_alt_tokens_k
        if k <= 0:
            return None
        setting = TransitionParams(request.sampling_params.temperature, -1, 1.0)
        rows = TransitionTable(self.model, setting)
        previous = tokens[:-1]
        drawn = [
            [candidates[bisect_right(totals, rng.random())] for _ in range(k)]
            for candidates, totals in (rows[token] for token in previous.tolist())
        ]
        ids = np.array(drawn, dtype=np.int64).reshape(len(previous), k)
        logprobs = rows.scoring_model.logprobs_VV[previous[:, None], ids].astype(np.float32)
        return PromptAltTokens(TensorData.from_numpy(ids), TensorData.from_numpy(logprobs))


def seeded_rng(seed: int, index: int | str) -> random.Random:
    """The dice of one sample of a seed; neighbours in either number have nothing in common."""
    return random.Random(f"{seed}/{index}")


def generate_sequence(previous: int, spec: GenerationSpec, rng: random.Random) -> SampledSequence:
    """Draw tokens after `previous` until one of the stops, or the most there may be."""
    # Local names: this loop is most of what a sample costs.
    rows, (stop_tokens, stop_texts), max_tokens, num_topk = spec
    throw = rng.random
    path = [previous]
    text = bytearray()
    reason: StopReason = "length"
    for _ in range(max_tokens):
        candidates, totals = rows[previous]
        previous = candidates[bisect_right(totals, throw())]
        path.append(previous)
        if previous in stop_tokens or (stop_texts and matches_after(text, previous, stop_texts)):
            reason = "stop"
            break
    tokens = np.array(path)
    logprobs = score_tokens(rows.scoring_model, tokens).astype(np.float32)
    topk = find_topk(rows.scoring_model, tokens[:-1], num_topk) if num_topk > 0 else None
    return SampledSequence(reason, "", tokens[1:].astype(np.int32), logprobs, topk)


def parse_stop(params: SamplingParams) -> ByteStopConditions:
    """Where a sample ends; a stop that is given replaces the end token."""
    stop = params.stop
    if stop is None:
        return _STOP_AT_EOS
    given = [stop] if isinstance(stop, str) else list(stop)
    if "" in given:
        raise InvalidInput(f"stop has an empty text, which ends nothing: {stop!r:.80}")
    return ByteStopConditions(
        frozenset(token for token in given if isinstance(token, int)),
        tuple(text.encode() for text in given if isinstance(text, str)),
    )


def matches_after(text: bytearray, token: int, stops: tuple[bytes, ...]) -> bool:
    """Add a token to the text, and say whether it completes one of the stops."""
    added = token_bytes(token)
    text += added
    return bool(added) and text.endswith(stops)


def _has_prompt_queries(request: SampleRequest) -> bool:
    return (
        bool(request.prompt_logprobs)
        or request.topk_prompt_logprobs > 0
        or request.target_prompt_logprobs is not None
        or request.prompt_alt_tokens_k > 0
    )
