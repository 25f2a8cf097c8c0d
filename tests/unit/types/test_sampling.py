"""Sampling parameters and results."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest

from tinkex.errors import InvalidInput
from tinkex.types import (
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
    TopkLogprobs,
)
from tinkex.types.sampling import FILLER_LOGPROB


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "is 0; expected at least 1, or None"),
        ("max_tokens", -5, "is -5; expected at least 1"),
        ("max_tokens", 1.5, "is 1.5; expected int"),
        ("temperature", -0.1, "is -0.1; expected at least 0"),
        ("temperature", math.nan, "is nan; expected a finite number"),
        ("temperature", math.inf, "is inf; expected a finite number"),
        ("top_p", 0, "is 0.0; expected more than 0"),
        ("top_p", 1.5, "is 1.5; expected at most 1"),
        ("top_k", 0, "is 0; expected at least 1, or -1 for no limit"),
        ("top_k", -2, "is -2; expected at least 1, or -1 for no limit"),
        ("seed", "a", "is 'a'; expected int | None, got str"),
        ("stop", ["a", 1], r"mixes texts and token ids: \['a', 1\]"),
        ("stop", [1.5], r"\[0\] is 1.5"),
        ("stop", 5, "is 5; expected"),
    ],
)
def test_invalid_sampling_params_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"SamplingParams.{field} ?{message}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("stop", [None, "", "\n", [], ["a", "b"], [1, 2], ("a",)])
def test_every_form_of_stop_is_accepted(stop: Any) -> None:
    stored = SamplingParams(stop=stop).stop
    assert stored == (list(stop) if isinstance(stop, tuple) else stop)


def test_sampling_params_accept_boundary_values() -> None:
    params = SamplingParams(max_tokens=1, temperature=0, top_p=1, top_k=1, seed=-1)
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (1, 0.0, 1, -1)


def test_sequence_creates_lists_on_access() -> None:
    sequence = SampledSequence(
        "stop", "id", np.array([5, 6], np.int32), np.array([-0.5, -1.0], np.float32)
    )
    assert (sequence.tokens, sequence.logprobs, sequence.topk_logprobs) == (
        [5, 6],
        [-0.5, -1],
        None,
    )
    assert sequence.tokens is sequence.tokens
    assert sequence.logprobs is sequence.logprobs
    assert all(type(token) is int for token in sequence.tokens)


def test_sequence_can_be_built_from_lists() -> None:
    sequence = SampledSequence(
        stop_reason="length", sequence_id="id", _tokens_list=[5], _logprobs_list=[-0.5]
    )
    assert (sequence.tokens, sequence.logprobs) == ([5], [-0.5])
    assert sequence == SampledSequence(
        "length", "id", np.array([5], np.int32), np.array([-0.5], np.float32)
    )


def test_sequence_without_data_is_empty() -> None:
    sequence = SampledSequence(stop_reason="stop", sequence_id="id")
    assert (sequence.tokens, sequence.logprobs) == ([], None)


def test_topk_rows_omit_padding() -> None:
    filler = (0, FILLER_LOGPROB)
    cells = [[(7, -0.5), (0, -1.0), filler], [filler, filler, filler], [(1, -2.0), filler, filler]]
    topk = TopkLogprobs(
        np.array([[token for token, _ in row] for row in cells], np.int32),
        np.array([[logprob for _, logprob in row] for row in cells], np.float32),
    )
    rows = [[(7, -0.5), (0, -1.0)], None, [(1, -2.0)]]
    assert topk.to_rows() == rows
    assert SampledSequence("stop", "id", topk_logprobs_np=topk).topk_logprobs == rows
    assert SampleResponse([], topk_prompt_logprobs_np=topk).topk_prompt_logprobs == rows


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty_topk_has_no_rows(shape: tuple[int, int]) -> None:
    assert TopkLogprobs(np.zeros(shape, np.int32), np.zeros(shape, np.float32)).to_rows() == []


def test_prompt_logprobs_are_none_where_not_scored() -> None:
    response = SampleResponse([], prompt_logprobs_np=np.array([math.nan, -0.5], np.float32))
    assert response.prompt_logprobs == [None, -0.5]
    assert response.prompt_logprobs is response.prompt_logprobs
    assert SampleResponse([]).prompt_logprobs is None
    assert SampleResponse([], _prompt_logprobs_list=[None]).prompt_logprobs == [None]
    assert SampleResponse([]).topk_prompt_logprobs is None


def test_responses_compare_pickle_and_copy_by_value() -> None:
    response = SampleResponse(
        [SampledSequence("stop", "id", np.array([5], np.int32))],
        np.array([math.nan, -0.5], np.float32),
        TopkLogprobs(np.array([[1]], np.int32), np.array([[-0.5]], np.float32)),
        TensorData([[0.5]], "float32"),
        3,
        PromptAltTokens(TensorData([[1]], "int64"), TensorData([[-1.0]], "float32")),
    )
    assert pickle.loads(pickle.dumps(response)) == copy.deepcopy(response) == response
    assert response != SampleResponse([])
    assert response.sequences[0] != SampledSequence("length", "id", np.array([5], np.int32))


def test_results_have_no_instance_dict() -> None:
    sequence = SampledSequence("stop", "id")
    assert not hasattr(sequence, "__dict__")
    assert not hasattr(SampleResponse([sequence]), "__dict__")
    with pytest.raises(AttributeError):
        sequence.stop_reason = "length"  # type: ignore[misc]
