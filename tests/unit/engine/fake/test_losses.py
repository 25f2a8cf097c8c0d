"""The loss functions: slopes by finite differences, formulas by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tinkex.engine.fake.losses import LOSSES, Scored, cispo, cross_entropy, gspo, ppo

SAMPLED = np.array([-1.0, -2.0, -0.5, -1.5, -0.7])
NOW = SAMPLED + np.array([0.1, -0.3, 0.05, 0.4, -0.02])
ADVANTAGES = np.array([1.0, -1.0, 2.0, 0.5, -0.5])


def scored(
    now: np.ndarray = NOW,
    config: Mapping[str, float | str] | None = None,
    **inputs: np.ndarray,
) -> Scored:
    given = {"logprobs": SAMPLED, "advantages": ADVANTAGES, **inputs}
    return Scored(logprobs_P=now, inputs=given, config=config or {}, starts=np.array([0, 3]))


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_slope_agrees_with_finite_differences(name: str) -> None:
    weights = {"weights": np.array([0.0, 1.0, 0.5, 2.0, 1.0])} if name == "cross_entropy" else {}
    slope = LOSSES[name](scored(**weights)).slope_P
    for index in range(len(NOW)):
        nudge = np.zeros_like(NOW)
        nudge[index] = 1e-6
        up = LOSSES[name](scored(NOW + nudge, **weights)).value
        down = LOSSES[name](scored(NOW - nudge, **weights)).value
        assert slope[index] == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-6)


def test_cross_entropy_without_weights_counts_every_token_once() -> None:
    assert cross_entropy(scored()).value == pytest.approx(-NOW.sum())


def test_ppo_ignores_what_was_clipped() -> None:
    ratio = np.exp(NOW - SAMPLED)
    held = np.clip(ratio, 0.8, 1.2)
    loss = ppo(scored())
    assert loss.value == pytest.approx(-np.minimum(ratio * ADVANTAGES, held * ADVANTAGES).sum())
    # The second ratio fell below 0.8 with a negative advantage, the fourth rose above 1.2.
    assert loss.slope_P[1] == 0.0
    assert loss.slope_P[3] == 0.0
    assert loss.slope_P[0] == pytest.approx(-ratio[0])


def test_clip_bounds_come_from_inputs_before_config_before_defaults() -> None:
    by_config = ppo(scored(config={"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}))
    assert (by_config.slope_P != 0.0).all()
    tight = np.full(5, 1.0)
    by_input = ppo(
        scored(
            config={"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
            clip_low_threshold=tight,
            clip_high_threshold=tight,
        )
    )
    assert by_input.value == pytest.approx(
        -np.minimum(np.exp(NOW - SAMPLED) * ADVANTAGES, ADVANTAGES).sum()
    )


def test_cispo_holds_the_clamped_ratio_constant() -> None:
    held = np.clip(np.exp(NOW - SAMPLED), 0.0, 1.1)
    loss = cispo(scored(config={"clip_high_threshold": 1.1}))
    assert loss.value == pytest.approx(-(held * NOW * ADVANTAGES).sum())
    np.testing.assert_allclose(loss.slope_P, -held * ADVANTAGES)


def test_gspo_has_one_ratio_per_example_taken_where_the_mask_is_set() -> None:
    mask = np.array([1.0, 1.0, 0.0, 1.0, 1.0])
    drift = NOW - SAMPLED
    ratios = np.repeat(np.exp([drift[:2].mean(), drift[3:].mean()]), [3, 2])
    loss = gspo(
        scored(
            config={"clip_low_threshold": 0.0, "clip_high_threshold": 9.0}, sequence_ratio_mask=mask
        )
    )
    assert loss.value == pytest.approx(-(ratios * ADVANTAGES).sum())
    np.testing.assert_allclose(loss.slope_P, -ratios * ADVANTAGES)


def test_a_huge_ratio_is_infinite_and_does_not_warn() -> None:
    loss = LOSSES["importance_sampling"](scored(NOW + 1000.0, advantages=np.ones(5)))
    assert loss.value == -np.inf


def test_a_missing_input_and_a_text_for_a_number_are_named() -> None:
    bare = Scored(logprobs_P=NOW, inputs={}, config={}, starts=np.array([0]))
    with pytest.raises(ValueError, match=r"loss_fn_inputs\['logprobs'\], which is missing"):
        LOSSES["ppo"](bare)
    with pytest.raises(ValueError, match=r"'beta'\] must be a number, got 'big'"):
        LOSSES["dro"](scored(config={"beta": "big"}))
