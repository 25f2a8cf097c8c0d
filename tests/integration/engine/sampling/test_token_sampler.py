"""Sampled tokens follow the distribution for any vocabulary size, top-k and top-p."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tinkex.engine.sampling.request import SampleSpec
from tinkex.engine.sampling.stop_conditions import StopConditions
from tinkex.engine.sampling.token_sampler import (
    SampledTokens,
    SamplingSettings,
    draw_tokens,
    greedy,
    sample_tokens,
)

ASK = SampleSpec(
    prompt=np.array([1]),
    num_samples=1,
    max_tokens=1,
    seed=0,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    stops=StopConditions(),
    num_topk=0,
    prompt_logprobs=None,
)


def _logits(size: int, seed: int = 0, spread: float = 1.5) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def _choose(logits: torch.Tensor, spec: SampleSpec, numbers: np.ndarray) -> SampledTokens:
    rows = logits.expand(len(numbers), -1).clone()
    return sample_tokens(
        rows, SamplingSettings([spec] * len(numbers), torch.device("cpu")), numbers
    )


def _wanted(logits: torch.Tensor, spec: SampleSpec) -> np.ndarray:
    """The distribution by its definition, in float64: temperature, then top-k, then top-p."""
    chances = (logits.double() / spec.temperature).softmax(-1).numpy()
    order = np.argsort(-chances, kind="stable")
    if spec.top_k:
        order = order[: spec.top_k]
    kept_probs = chances[order] / chances[order].sum()
    order = order[kept_probs.cumsum() - kept_probs < spec.top_p]
    cut = np.zeros_like(chances)
    cut[order] = chances[order]
    return cut / cut.sum()


def _is_plausible(counts: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether chi-square is within five standard deviations; rare cells are merged."""
    expected = wanted * counts.sum()
    is_rare = expected < 5
    seen = np.append(counts[~is_rare], counts[is_rare].sum())
    should = np.append(expected[~is_rare], expected[is_rare].sum())
    if should[-1] < 5:
        seen, should = seen[:-1], should[:-1]
    degrees = max(1, len(should) - 1)
    chi = float(((seen - should) ** 2 / should).sum())
    return chi < degrees + 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 7},
        {"top_p": 0.7},
        {"top_k": 20, "top_p": 0.8, "temperature": 1.3},
        {"top_p": 0.999},
        {"top_k": 150},
    ],
)
@pytest.mark.parametrize("size", [50, 128, 300])
def test_sampled_token_frequencies_match_distribution(fields: dict[str, float], size: int) -> None:
    spec, logits = replace(ASK, **fields), _logits(size)
    numbers = np.random.default_rng(1).random(20_000)
    found = _choose(logits, spec, numbers)
    counts = np.bincount(found.tokens, minlength=size)
    wanted = _wanted(logits, spec)
    assert not counts[wanted == 0].any(), "truncated tokens are never sampled"
    assert _is_plausible(counts, wanted)
    scores = (logits.double() / spec.temperature).log_softmax(-1).numpy()
    assert np.allclose(found.logprobs, scores[found.tokens], atol=1e-5)


def test_top_p_of_flat_distribution() -> None:
    logits = _logits(3000, spread=0.01)
    spec = replace(ASK, top_p=0.9)
    found = _choose(logits, spec, np.random.default_rng(1).random(4000))
    wanted = _wanted(logits, spec)
    assert 2500 < (wanted > 0).sum() < 2900
    assert (wanted[found.tokens] > 0).all()


def test_rare_tokens_of_a_large_vocabulary_are_drawn() -> None:
    # A cumulative sum in float32 would lose all of these.
    weights = torch.full((1, 60_000), 1e-9)
    weights[0, 0] = 1.0
    numbers = torch.tensor([0.9999], dtype=torch.float64)
    rare = 60_000 * 1e-9
    assert int(draw_tokens(weights, numbers)) == 0
    inside = torch.tensor([(1.0 + rare / 2) / (1.0 + rare)], dtype=torch.float64)
    assert 29_000 < int(draw_tokens(weights, inside)) < 31_000


@pytest.mark.parametrize("number", [0.0, 1.0 - 2**-53])
def test_extreme_uniforms_select_valid_tokens(number: float) -> None:
    weights = torch.zeros(1, 300)
    weights[0, 40:200] = torch.rand(160, generator=torch.Generator().manual_seed(0)) + 0.1
    assert 40 <= int(draw_tokens(weights, torch.tensor([number], dtype=torch.float64))) < 200


def test_greedy_breaks_ties_by_lowest_id() -> None:
    logits = torch.zeros(3, 300)
    logits[0, [70, 200, 299]] = 1.0
    logits[1, [299]] = 1.0
    assert greedy(logits).tolist() == [70, 299, 0]


def test_rows_have_their_own_settings() -> None:
    specs = [
        replace(ASK, temperature=0.0),
        replace(ASK, temperature=0.2),
        replace(ASK, top_k=1),
        replace(ASK, top_p=0.01),
        ASK,
    ]
    logits = _logits(300).expand(5, -1).clone()
    best = int(logits[0].argmax())
    numbers = np.full(5, 0.9)
    together = sample_tokens(logits.clone(), SamplingSettings(specs, torch.device("cpu")), numbers)
    alone = [_choose(logits[0], spec, numbers[:1]) for spec in specs]
    assert together.tokens == [one.tokens[0] for one in alone]
    assert [together.tokens[row] for row in (0, 2, 3)] == [best] * 3
    assert np.allclose(together.logprobs, [one.logprobs[0] for one in alone])


def test_nan_logits_are_detected() -> None:
    for spec in (ASK, replace(ASK, temperature=0.0), replace(ASK, top_k=3)):
        found = _choose(torch.full((211,), float("nan")), spec, np.array([0.5]))
        assert np.isnan(found.logprobs[0])
        assert 0 <= found.tokens[0] < 211
