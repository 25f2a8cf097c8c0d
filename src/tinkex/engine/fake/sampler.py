"""Samples from a bigram model, and scores prompts.

Log-probabilities of sampled tokens are those of the distribution after temperature and before top-k
and top-p; those of prompts and of greedy samples are the model's own. Sample j of seed s depends
only on the weights, the last prompt token, s and j. Each distribution is computed once per setting,
so that drawing a token costs one random number and one binary search.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tinkex.detokenizer import TextDecoder
from tinkex.engine.examples import check_tokens
from tinkex.engine.fake.bigram import Bigram, Floats, Tokens, flatten_tokens, score_tokens
from tinkex.engine.fake.scripted import ScriptedText
from tinkex.engine.fake.toy_tokenizer import EOS_TOKEN, token_bytes
from tinkex.engine.sampling.grammars import Grammar
from tinkex.engine.sampling.request import is_prompt_only, parse_grammar
from tinkex.engine.sampling.stop_conditions import StopConditions, StopTextMatcher, parse_stop
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


#: The value of `max_tokens` if the request has none.
DEFAULT_MAX_TOKENS = 128
_MAX_TABLES = 8


def max_sampled_tokens(params: SamplingParams) -> int:
    """The maximum number of tokens of a sequence."""
    return 0 if is_prompt_only(params) else params.max_tokens or DEFAULT_MAX_TOKENS


class _ByteDecoder:
    """Decodes tokens for stop strings; EOS and tokens that are not bytes have no text."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        return b"".join(map(token_bytes, token_ids)).decode(errors="replace")


_BYTE_DECODER = _ByteDecoder()


class GenerationSpec(NamedTuple):
    """How the sequences of a request are drawn."""

    transitions: TransitionTable
    stops: StopConditions
    max_tokens: int
    num_topk: int
    decoder: TextDecoder = _BYTE_DECODER

    def stop_matcher(self) -> StopTextMatcher | None:
        """A new matcher of the stop texts; None without any."""
        return StopTextMatcher(self.decoder, self.stops.texts) if self.stops.texts else None


class BigramSampler:
    """Samples from one model; keeps the transition tables of recent settings."""

    def __init__(self, model: Bigram, text: ScriptedText | None = None) -> None:
        """`text` makes it a scripted model."""
        self.model = model
        self._text = text
        self._tables: dict[TransitionParams, TransitionTable] = {}

    def sample(self, request: SampleRequest, rng: random.Random) -> SampleResponse:
        """Answer a request; `rng` chooses the seed if the request has none."""
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
        """Answer a request in steps of one sequence; raises InvalidInput for a bad request."""
        params = request.sampling_params
        prompt = flatten_tokens(request.prompt)
        self._check_request(request, prompt)
        seed = params.seed if params.seed is not None else rng.getrandbits(64)
        text = self._text
        eos_token = text.eos_token if text is not None else EOS_TOKEN
        spec = GenerationSpec(
            self._get_table(params),
            parse_stop(params, frozenset({eos_token}), has_tokenizer=True),
            max_sampled_tokens(params),
            request.topk_sample_logprobs,
            text or _BYTE_DECODER,
        )
        answers = text.find_answers(prompt) if text is not None else []
        grammar = None if answers else self._compile_grammar(params)
        sequences = []
        for index in range(request.num_samples):
            rng = seeded_rng(seed, index)
            if answers:
                answer = answers[index % len(answers)]
                sequences.append(follow_script(prompt[-1], spec, answer))
            elif grammar is not None:
                sequences.append(follow_grammar(prompt[-1], spec, rng, grammar.copy()))
            else:
                sequences.append(generate_sequence(prompt[-1], spec, rng))
            yield
        if not _has_prompt_queries(request):
            return SampleResponse(sequences)
        return self._add_prompt_results(
            request, sequences, np.array(prompt), seeded_rng(seed, "prompt")
        )

    def _compile_grammar(self, params: SamplingParams) -> Grammar | None:
        spec = parse_grammar(params)
        if spec is None:
            return None
        if self._text is None:
            raise InvalidInput("structured output needs a model with a tokenizer")
        return self._text.compile_grammar(spec)

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
        # The first token has no context, so it is never scored.
        first = 1 if last_n is None else len(tokens) - last_n
        return SampleResponse(
            sequences,
            self._prompt_logprobs(tokens, first) if request.prompt_logprobs else None,
            self._prompt_topk(tokens, first, k) if k > 0 else None,
            target_prompt_logprobs=self._target_logprobs(tokens, request.target_prompt_logprobs),
            prompt_alt_tokens=self._draw_alternatives(tokens, request, rng),
        )

    def _get_table(self, params: SamplingParams) -> TransitionTable:
        table_params = TransitionParams(params.temperature, params.top_k, params.top_p)
        transitions = self._tables.get(table_params)
        if transitions is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            transitions = self._tables[table_params] = TransitionTable(self.model, table_params)
        return transitions

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
        table_params = TransitionParams(request.sampling_params.temperature, -1, 1.0)
        transitions = TransitionTable(self.model, table_params)
        previous = tokens[:-1]
        drawn = [
            [candidates[bisect_right(cumulative, rng.random())] for _ in range(k)]
            for candidates, cumulative in (transitions[token] for token in previous.tolist())
        ]
        ids = np.array(drawn, dtype=np.int64).reshape(len(previous), k)
        logprobs = transitions.scoring_model.logprobs_VV[previous[:, None], ids].astype(np.float32)
        return PromptAltTokens(TensorData.from_numpy(ids), TensorData.from_numpy(logprobs))


def seeded_rng(seed: int, index: int | str) -> random.Random:
    """The random generator of one sample; different seeds or indices give unrelated streams."""
    return random.Random(f"{seed}/{index}")


def generate_sequence(previous: int, spec: GenerationSpec, rng: random.Random) -> SampledSequence:
    """Draw tokens after `previous` until a stop condition or `max_tokens`."""
    # Local names: this loop is most of the cost of a sample.
    transitions, (stop_tokens, _), max_tokens, *_ = spec
    stop_matcher = spec.stop_matcher()
    uniform = rng.random
    path = [previous]
    reason: StopReason = "length"
    for _ in range(max_tokens):
        candidates, cumulative = transitions[previous]
        previous = candidates[bisect_right(cumulative, uniform())]
        path.append(previous)
        if previous in stop_tokens or (stop_matcher and stop_matcher.matches_after(previous)):
            reason = "stop"
            break
    return _score_sequence(path, reason, spec)


def follow_script(previous: int, spec: GenerationSpec, answer: Sequence[int]) -> SampledSequence:
    """Take the tokens of an answer until a stop condition or `max_tokens`."""
    stop_matcher = spec.stop_matcher()
    path = [previous]
    for token in answer[: spec.max_tokens]:
        path.append(token)
        if token in spec.stops.tokens or (stop_matcher and stop_matcher.matches_after(token)):
            return _score_sequence(path, "stop", spec)
    return _score_sequence(path, "length", spec)


def follow_grammar(
    previous: int, spec: GenerationSpec, rng: random.Random, grammar: Grammar
) -> SampledSequence:
    """Draw tokens that a grammar allows, without top-k and top-p."""
    stop_matcher = spec.stop_matcher()
    probs_VV = spec.transitions.scoring_model.probs_VV
    path = [previous]
    for _ in range(spec.max_tokens):
        weights = probs_VV[path[-1]]
        if grammar.has_started:
            weights = np.where(grammar.allowed_tokens(), weights, 0.0)
        token = bisect_right(_cumulative_probs(weights), rng.random())
        path.append(token)
        grammar.accept(token)
        if token in spec.stops.tokens or (stop_matcher and stop_matcher.matches_after(token)):
            return _score_sequence(path, "stop", spec)
    return _score_sequence(path, "length", spec)


def _score_sequence(path: list[int], reason: StopReason, spec: GenerationSpec) -> SampledSequence:
    """The sequence of a path, whose first token is the last one of the prompt."""
    tokens, model = np.array(path), spec.transitions.scoring_model
    logprobs = score_tokens(model, tokens).astype(np.float32)
    has_topk = spec.num_topk > 0 and len(path) > 1
    topk = find_topk(model, tokens[:-1], spec.num_topk) if has_topk else None
    return SampledSequence(reason, "", tokens[1:].astype(np.int32), logprobs, topk)


def _has_prompt_queries(request: SampleRequest) -> bool:
    return (
        bool(request.prompt_logprobs)
        or request.topk_prompt_logprobs > 0
        or request.target_prompt_logprobs is not None
        or request.prompt_alt_tokens_k > 0
    )
