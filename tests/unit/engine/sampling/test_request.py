"""Parsing and validation of sample requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinkex.engine.inference_request import InferenceParams, InferenceRequest
from tinkex.engine.sampling.request import (
    DEFAULT_MAX_TOKENS,
    ModelLimits,
    SampleSpec,
    parse_sample_request,
)
from tinkex.errors import InvalidInput
from tinkex.types import ModelInput, SampleRequest, SamplingParams, TensorData

LIMITS = ModelLimits(
    vocab_size=50, max_context_tokens=100, eos_tokens=frozenset({2}), has_tokenizer=False
)


def _read(prompt: list[int], limits: ModelLimits = LIMITS, **fields: Any) -> SampleSpec:
    params = {
        name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__
    }
    request = SampleRequest(
        prompt=ModelInput.from_ints(prompt), sampling_params=SamplingParams(**params), **fields
    )
    return parse_sample_request(request, limits)


def test_missing_parameters_use_defaults() -> None:
    spec = _read([1, 2, 3])
    assert spec.max_tokens == 97
    assert spec.stops.tokens == {2}
    assert (spec.temperature, spec.top_k, spec.top_p) == (1, 0, 1)
    assert spec.prompt_logprobs is None
    assert spec.seed != _read([1, 2, 3]).seed
    wide = ModelLimits(
        vocab_size=50, max_context_tokens=10**6, eos_tokens=frozenset(), has_tokenizer=False
    )
    assert _read([1], wide).max_tokens == DEFAULT_MAX_TOKENS


@pytest.mark.parametrize(
    ("prompt", "fields", "reason"),
    [
        ([], {}, "prompt is empty"),
        ([50], {}, "token 50"),
        ([1] * 101, {}, "101 tokens"),
        ([1] * 100, {}, "max_tokens is 1; together they may be at most 100"),
        ([1] * 90, {"max_tokens": 11}, "90 tokens and max_tokens is 11"),
        ([1], {"num_samples": 0}, "num_samples is 0"),
        ([1], {"num_samples": 1025}, "num_samples is 1025"),
        ([1], {"topk_sample_logprobs": 51}, "topk_sample_logprobs is 51"),
        ([1], {"topk_prompt_logprobs": 51}, "topk_prompt_logprobs is 51"),
        ([1], {"prompt_alt_tokens_k": 51}, "prompt_alt_tokens_k is 51"),
        ([1, 2], {"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n is 2, expected 1 to 1"),
        ([1, 2], {"prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n is 0"),
        ([1], {"stop": "x"}, "no tokenizer"),
    ],
)
def test_invalid_parameters_are_rejected(
    prompt: list[int], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        _read(prompt, **fields)


def test_prompt_of_full_context_can_be_scored() -> None:
    request = InferenceRequest(
        prompt=ModelInput.from_ints([1] * 100),
        sampling_params=InferenceParams(max_tokens=5, is_prompt_only=True),
    )
    assert parse_sample_request(request, LIMITS).max_tokens == 0


def test_targets_must_match_prompt_and_vocabulary() -> None:
    targets = TensorData.from_numpy(np.array([[1], [2]]))
    with pytest.raises(InvalidInput, match="expected 3 rows for 4 prompt tokens"):
        _read([1, 2, 3, 4], target_prompt_logprobs=targets)
    with pytest.raises(InvalidInput, match="token 50"):
        _read([1, 2, 3], target_prompt_logprobs=TensorData.from_numpy(np.array([[50], [-1]])))


def test_first_position_depends_on_requested_scores() -> None:
    about = _read([1] * 10, prompt_logprobs=True, prompt_logprobs_last_n=3).prompt_logprobs
    assert about is not None
    assert about.first_position == 6
    about = _read([1] * 10, prompt_alt_tokens_k=1, prompt_logprobs_last_n=3).prompt_logprobs
    assert about is not None
    assert about.first_position == 0
