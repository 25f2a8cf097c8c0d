"""Sampling from a bigram model: parameters, stop conditions, seeds and prompt scores."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tinkex.engine.fake.bigram import Bigram
from tinkex.engine.fake.sampler import BigramSampler, TransitionParams, build_transition_row
from tinkex.engine.fake.toy_tokenizer import EOS_TOKEN
from tinkex.engine.inference_request import InferenceParams, InferenceRequest
from tinkex.errors import InvalidInput
from tinkex.types import ModelInput, SampleRequest, SampleResponse, SamplingParams, TensorData

MODEL = Bigram.base("tinkex/bigram")


def chain(*tokens: int) -> Bigram:
    """A model that almost always generates these tokens in order."""
    logits = np.zeros((512, 512))
    for previous, following in pairwise(tokens):
        logits[previous, following] = 50.0
    return Bigram(logits)


def sample(
    model: Bigram = MODEL,
    prompt: list[int] | None = None,
    dice: int = 0,
    asked: dict[str, Any] | None = None,
    **params: Any,
) -> SampleResponse:
    request = SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3] if prompt is None else prompt),
        sampling_params=SamplingParams(**{"max_tokens": 8, **params}),
        **(asked or {}),
    )
    return BigramSampler(model).sample(request, random.Random(dice))


def infer(model: Bigram, prompt: list[int], params: InferenceParams, **fields: Any) -> Any:
    request = InferenceRequest(
        prompt=ModelInput.from_ints(prompt), sampling_params=params, **fields
    )
    return BigramSampler(model).sample(request, random.Random(0))


@pytest.mark.parametrize(
    ("stops", "tokens"),
    [
        ({}, [2, 97, 98, 4, EOS_TOKEN]),
        ({"stop_texts": ("ab",)}, [2, 97, 98]),
        ({"stop_texts": ("zz",)}, [2, 97, 98, 4, EOS_TOKEN]),
        ({"stop_texts": ("ab",), "stop_token_ids": (2,)}, [2]),
    ],
)
def test_stop_texts_and_tokens_are_added_to_eos(stops: dict[str, Any], tokens: list[int]) -> None:
    params = InferenceParams(max_tokens=9, **stops)
    [sequence] = infer(chain(1, 2, 97, 98, 4, EOS_TOKEN), [1], params).sequences
    assert (sequence.tokens, sequence.stop_reason) == (tokens, "stop")


def test_prompt_is_scored_without_sampling() -> None:
    params = InferenceParams(max_tokens=9, seed=1, is_prompt_only=True)
    fields = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}
    scored = infer(MODEL, [1, 2, 3], params, **fields)
    assert [(one.tokens, one.stop_reason) for one in scored.sequences] == [([], "length")]
    assert scored.prompt_logprobs == sample(asked=fields).prompt_logprobs
    assert scored.topk_prompt_logprobs == sample(asked=fields).topk_prompt_logprobs


def test_temperature_zero_is_greedy() -> None:
    [sequence] = sample(temperature=0.0, stop=[]).sequences
    previous = 3
    for token, logprob in zip(sequence.tokens, sequence.logprobs or [], strict=True):
        assert token == MODEL.logprobs_VV[previous].argmax()
        assert logprob == pytest.approx(MODEL.logprobs_VV[previous, token])
        previous = token


def log_softmax(logits: np.ndarray) -> np.ndarray:
    scores: np.ndarray = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return scores


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.1}])
def test_logprobs_are_after_temperature_before_truncation(cut: dict[str, Any]) -> None:
    asked = {"topk_sample_logprobs": 2}
    [sequence] = sample(temperature=2.0, stop=[], asked=asked, **cut).sequences
    path = [3, *sequence.tokens]
    table = log_softmax(MODEL.logits_VV / 2.0)
    expected = table[path[:-1], path[1:]]
    assert sequence.logprobs == pytest.approx(expected.tolist(), rel=1e-6)
    assert sequence.topk_logprobs is not None
    best = [(row or [])[0][1] for row in sequence.topk_logprobs]
    assert best == pytest.approx(table[path[:-1]].max(axis=1).tolist(), rel=1e-6)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9, 1e300])
def test_any_temperature_gives_finite_logprobs(temperature: float) -> None:
    asked = {"topk_sample_logprobs": 512}
    [sequence] = sample(temperature=temperature, stop=[], asked=asked).sequences
    assert sequence.topk_logprobs_np is not None
    assert np.isfinite(sequence.topk_logprobs_np.logprobs).all()
    assert np.isfinite(sequence.logprobs or [np.nan]).all()


def test_prompt_logprobs_ignore_temperature() -> None:
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 1}
    cold, warm = sample(asked=asked), sample(asked=asked, temperature=3.0)
    assert cold.prompt_logprobs == warm.prompt_logprobs
    assert cold.topk_prompt_logprobs == warm.topk_prompt_logprobs


def test_sampled_frequencies_match_distribution() -> None:
    model = Bigram(np.log(np.tile([0.5, 0.3, 0.15, 0.05], (4, 1))))
    response = sample(model, [0], asked={"num_samples": 1}, max_tokens=20_000, stop=[])
    counts = np.bincount(response.sequences[0].tokens, minlength=4) / 20_000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.01)


def distribution(temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> dict[int, float]:
    row = build_transition_row(
        np.log([0.5, 0.3, 0.15, 0.05]), TransitionParams(temperature, top_k, top_p)
    )
    probs = np.diff([0.0, *row.cumulative_probs])
    return dict(zip(row.tokens, probs.round(6).tolist(), strict=True))


def test_temperature_top_k_and_top_p() -> None:
    assert distribution() == {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}
    assert distribution(top_k=2) == {0: 0.625, 1: 0.375}
    assert distribution(top_p=0.5) == {0: 1.0}
    assert distribution(top_p=0.51) == {0: 0.625, 1: 0.375}
    assert distribution(top_k=3, top_p=0.6) == {0: 0.625, 1: 0.375}
    assert distribution(temperature=0.0) == {0: 1.0}
    assert distribution(temperature=0.5)[0] == pytest.approx(0.25 / 0.365, abs=1e-6)
    assert distribution(temperature=1e-9) == {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0}


def test_seed_reproduces_samples() -> None:
    asked = {"num_samples": 3}
    one = sample(seed=7, dice=1, asked=asked, stop=[])
    two = sample(seed=7, dice=2, asked=asked, stop=[])
    texts = [sequence.tokens for sequence in one.sequences]
    assert texts == [sequence.tokens for sequence in two.sequences]
    assert len({tuple(text) for text in texts}) == 3
    assert texts[0] != sample(seed=8, stop=[]).sequences[0].tokens


def test_sample_depends_only_on_seed_and_index() -> None:
    many = sample(seed=7, asked={"num_samples": 4}, stop=[])
    few = sample(seed=7, asked={"num_samples": 2, "prompt_alt_tokens_k": 3}, stop=[])
    other_prompt = sample(seed=7, prompt=[9, 9, 9, 3], stop=[])
    assert few.sequences == many.sequences[:2]
    assert other_prompt.sequences == many.sequences[:1]
    # Sample 1 of seed 7 is not sample 0 of seed 8.
    assert sample(seed=8, stop=[]).sequences[0] != many.sequences[1]


def test_unseeded_sample_uses_rng() -> None:
    assert sample(dice=1, stop=[]) == sample(dice=1, stop=[])
    assert sample(dice=1, stop=[]) != sample(dice=2, stop=[])


@pytest.mark.parametrize(
    ("stop", "tokens", "reason"),
    [
        (None, [98, 99, 100, EOS_TOKEN], "stop"),
        ([], [98, 99, 100, EOS_TOKEN, 97, 98, 99, 100], "length"),
        ([99], [98, 99], "stop"),
        ("cd", [98, 99, 100], "stop"),
        (["xx", "bc"], [98, 99], "stop"),
        ("zz", [98, 99, 100, EOS_TOKEN, 97, 98, 99, 100], "length"),
    ],
)
def test_stop_condition_ends_the_sequence(stop: Any, tokens: list[int], reason: str) -> None:
    model = chain(97, 98, 99, 100, EOS_TOKEN, 97)
    [sequence] = sample(model, [97], temperature=0.0, stop=stop).sequences
    assert (sequence.tokens, sequence.stop_reason) == (tokens, reason)


@pytest.mark.parametrize("between", [300, EOS_TOKEN])
def test_stop_string_ignores_tokens_without_text(between: int) -> None:
    model = chain(120, 97, between, 98, 99)
    [sequence] = sample(model, [120], temperature=0.0, stop="ab").sequences
    assert (sequence.tokens, sequence.stop_reason) == ([97, between, 98], "stop")


def test_multibyte_stop_string_spans_tokens() -> None:
    model = chain(*"xж€".encode(), 97)
    [sequence] = sample(model, [ord("x")], temperature=0.0, stop="ж€", max_tokens=50).sequences
    assert bytes(sequence.tokens) == "ж€".encode()
    assert sequence.stop_reason == "stop"


def test_empty_stop_string_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="stop has an empty string"):
        sample(stop="")
    with pytest.raises(InvalidInput, match="stop has an empty string"):
        sample(stop=["a", ""])


def test_prompt_logprobs_score_every_token_but_the_first() -> None:
    response = sample(asked={"prompt_logprobs": True})
    assert response.prompt_logprobs == [
        None,
        pytest.approx(MODEL.logprobs_VV[1, 2]),
        pytest.approx(MODEL.logprobs_VV[2, 3]),
    ]
    last = sample(asked={"prompt_logprobs": True, "prompt_logprobs_last_n": 1})
    assert last.prompt_logprobs == [None, None, response.prompt_logprobs[2]]
    assert sample().prompt_logprobs is None


def test_topk_is_sorted_by_probability() -> None:
    response = sample(asked={"topk_prompt_logprobs": 2, "topk_sample_logprobs": 3}, max_tokens=2)
    rows = response.topk_prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    best = np.argsort(-MODEL.logprobs_VV[1])[:2]
    assert [token for token, _ in rows[1] or []] == best.tolist()
    [sequence] = response.sequences
    assert sequence.topk_logprobs is not None
    assert [len(row or []) for row in sequence.topk_logprobs] == [3, 3]
    assert (sequence.topk_logprobs[0] or [])[0][0] == MODEL.logprobs_VV[3].argmax()


def test_target_logprobs_keep_their_layout() -> None:
    dense = TensorData([[2, -1], [3, 9]], "int64")
    answer = sample(asked={"target_prompt_logprobs": dense}).target_prompt_logprobs
    table = MODEL.logprobs_VV
    assert answer is not None
    assert answer.tolist() == [
        [pytest.approx(table[1, 2]), 0.0],
        [pytest.approx(table[2, 3]), pytest.approx(table[2, 9])],
    ]
    sparse = TensorData([9], "int64", [2, 4], [0, 0, 1], [3])
    listed = sample(asked={"target_prompt_logprobs": sparse}).target_prompt_logprobs
    assert listed is not None
    assert listed.is_sparse
    assert listed.data == [pytest.approx(table[2, 9])]
    wrong = TensorData([[2]], "int64")
    with pytest.raises(ValueError, match="expected 2 rows"):
        sample(asked={"target_prompt_logprobs": wrong})


def test_alternatives_are_sampled_for_each_prompt_position() -> None:
    drawn = sample(asked={"prompt_alt_tokens_k": 4}).prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.shape == drawn.logprobs.shape == [2, 4]
    tokens, logprobs = drawn.tokens.to_numpy(), drawn.logprobs.to_numpy()
    np.testing.assert_allclose(logprobs[1], MODEL.logprobs_VV[2, tokens[1]], rtol=1e-6)
    greedy = sample(asked={"prompt_alt_tokens_k": 2}, temperature=0.0).prompt_alt_tokens
    assert greedy is not None
    assert greedy.tokens.tolist()[0] == [MODEL.logprobs_VV[1].argmax()] * 2


@pytest.mark.parametrize(
    ("prompt", "asked", "reason"),
    [
        ([], {}, "the prompt is empty"),
        ([512], {}, "token 512"),
        ([1], {"num_samples": 0}, "num_samples is 0"),
        ([1, 2], {"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n is 2, expected 1 to 1"),
    ],
)
def test_invalid_request_is_rejected(prompt: list[int], asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        sample(prompt=prompt, asked=asked)


def test_cached_tables_are_limited() -> None:
    sampler = BigramSampler(MODEL)
    for step in range(1, 30):
        params = SamplingParams(max_tokens=1, temperature=step / 10)
        request = SampleRequest(prompt=ModelInput.from_ints([1]), sampling_params=params)
        sampler.sample(request, random.Random(0))
    assert len(sampler._tables) <= 8
