"""Parses and validates sample requests."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinkex.engine.examples import check_tokens, count_text_tokens
from tinkex.engine.inference_request import InferenceParams
from tinkex.engine.sampling.stop_conditions import StopConditions, parse_stop
from tinkex.errors import InvalidInput
from tinkex.types import SampleRequest, SamplingParams, TensorData

Tokens = npt.NDArray[np.int64]

#: The value of `max_tokens` if the request has none; limited by the context length.
DEFAULT_MAX_TOKENS = 1024
#: Maximum number of sequences of one request.
MAX_SAMPLES = 1024
#: Maximum number of top-k or alternative tokens per position.
MAX_TOPK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The properties of a model that limit requests."""

    vocab_size: int
    max_context_tokens: int
    eos_tokens: frozenset[int]
    has_tokenizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobsSpec:
    """The requested scores of a prompt; the model's output at position r predicts token r + 1."""

    has_logprobs: bool
    num_topk: int
    first_scored: int
    """The first token to score, for log-probabilities and top-k."""
    num_alternatives: int
    targets: TensorData | None

    @property
    def first_position(self) -> int:
        """The first position whose hidden state is needed."""
        needs_all = self.num_alternatives > 0 or self.targets is not None
        return 0 if needs_all else self.first_scored - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A grammar that sequences must follow."""

    text: str
    start_text: str
    """The grammar applies after this text; empty: from the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """A validated request."""

    prompt: Tokens
    num_samples: int
    max_tokens: int
    """0 to score the prompt only."""
    seed: int
    temperature: float
    top_k: int
    """0 means no limit."""
    top_p: float
    stops: StopConditions
    num_topk: int
    prompt_logprobs: PromptLogprobsSpec | None
    grammar: GrammarSpec | None = None

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a sequence, including the prompt."""
        return len(self.prompt) + self.max_tokens


def parse_sample_request(request: SampleRequest, limits: ModelLimits) -> SampleSpec:
    """Parse a request; raises InvalidInput if it is invalid."""
    params = request.sampling_params
    num_prompt = count_text_tokens("the prompt", request.prompt, limits.max_context_tokens)
    max_tokens = _parse_max_tokens(params, num_prompt, limits.max_context_tokens)
    _check_counts(request, limits.vocab_size)
    prompt = check_tokens("the prompt", request.prompt.to_ints(), limits.vocab_size)
    return SampleSpec(
        prompt=prompt,
        num_samples=request.num_samples,
        max_tokens=max_tokens,
        seed=params.seed if params.seed is not None else secrets.randbits(64),
        temperature=params.temperature,
        top_k=_parse_top_k(params, limits.vocab_size),
        top_p=params.top_p,
        stops=parse_stop(params, limits.eos_tokens, has_tokenizer=limits.has_tokenizer),
        num_topk=request.topk_sample_logprobs,
        prompt_logprobs=_parse_prompt_logprobs(request, len(prompt), limits.vocab_size),
        grammar=parse_grammar(params),
    )


def is_prompt_only(params: SamplingParams) -> bool:
    """Whether a request only scores its prompt."""
    return isinstance(params, InferenceParams) and params.is_prompt_only


def parse_grammar(params: SamplingParams) -> GrammarSpec | None:
    """The grammar of a request; None without one."""
    if not isinstance(params, InferenceParams) or params.grammar is None:
        return None
    return GrammarSpec(text=params.grammar, start_text=params.grammar_start_text)


def _parse_max_tokens(params: SamplingParams, num_prompt: int, max_context_tokens: int) -> int:
    if num_prompt == 0:
        raise InvalidInput("the prompt is empty")
    remaining, max_tokens = max_context_tokens - num_prompt, params.max_tokens
    if is_prompt_only(params):
        max_tokens = 0
    elif max_tokens is None:
        max_tokens = min(max(remaining, 1), DEFAULT_MAX_TOKENS)
    if max_tokens > remaining:
        raise InvalidInput(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}; together they "
            f"may be at most {max_context_tokens}"
        )
    return max_tokens


def _parse_top_k(params: SamplingParams, vocab_size: int) -> int:
    return params.top_k if 1 <= params.top_k < vocab_size else 0


def _check_counts(request: SampleRequest, vocab_size: int) -> None:
    if request.num_samples < 1:
        raise InvalidInput(f"num_samples is {request.num_samples}, expected at least 1")
    max_topk = min(MAX_TOPK, vocab_size)
    limits = {
        "num_samples": MAX_SAMPLES,
        "topk_prompt_logprobs": max_topk,
        "topk_sample_logprobs": max_topk,
        "prompt_alt_tokens_k": max_topk,
    }
    for name, limit in limits.items():
        value = getattr(request, name)
        if value > limit:
            raise InvalidInput(f"{name} is {value}; expected at most {limit}")


def _parse_prompt_logprobs(
    request: SampleRequest, num_prompt: int, vocab_size: int
) -> PromptLogprobsSpec | None:
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n < num_prompt:
        raise InvalidInput(
            f"prompt_logprobs_last_n is {last_n}, expected 1 to {num_prompt - 1} here"
        )
    _check_targets(request.target_prompt_logprobs, num_prompt, vocab_size)
    spec = PromptLogprobsSpec(
        has_logprobs=bool(request.prompt_logprobs),
        num_topk=max(0, request.topk_prompt_logprobs),
        # The first token has no context, so it is never scored.
        first_scored=1 if last_n is None else num_prompt - last_n,
        num_alternatives=max(0, request.prompt_alt_tokens_k),
        targets=request.target_prompt_logprobs,
    )
    has_scores = spec.has_logprobs or spec.num_topk or spec.num_alternatives
    return spec if has_scores or spec.targets is not None else None


def _check_targets(targets: TensorData | None, num_prompt: int, vocab_size: int) -> None:
    if targets is None:
        return
    if len(targets.shape) != 2 or targets.shape[0] != num_prompt - 1:
        raise InvalidInput(
            f"target_prompt_logprobs has shape {targets.shape}, "
            f"expected {num_prompt - 1} rows for {num_prompt} prompt tokens"
        )
    check_tokens("target_prompt_logprobs", np.maximum(targets.array.ravel(), 0), vocab_size)
