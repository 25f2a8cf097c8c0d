"""Loss functions: gradients by finite differences, formulas by hand, and invalid requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tinkex.engine.examples import TrainingExample
from tinkex.engine.losses import (
    LOSSES,
    LossValue,
    ScoredTokens,
    check_loss,
    compute_loss,
    get_loss,
    parse_loss_config,
    sum_metrics,
)
from tinkex.errors import InvalidInput
from tinkex.types import ForwardBackwardInput

SAMPLED = np.array([-1.0, -2.0, -0.5, -1.5, -0.7])
NOW = SAMPLED + np.array([0.1, -0.3, 0.05, 0.4, -0.02])
ADVANTAGES = np.array([1.0, -1.0, 2.0, 0.5, -0.5])


def loss_of(
    name: str,
    now: np.ndarray = NOW,
    config: Mapping[str, float] | None = None,
    **inputs: np.ndarray,
) -> LossValue:
    """The loss of two examples, with three and two pairs."""
    loss = LOSSES[name]
    given = {"logprobs": SAMPLED, "advantages": ADVANTAGES, **inputs}
    settings = {**loss.settings, **(config or {})}
    return loss.compute(
        ScoredTokens(
            logprobs_P=now, inputs=given, settings=settings, example_starts=np.array([0, 3])
        )
    )


def work(loss_fn: Any, config: Mapping[str, Any] | None = None) -> ForwardBackwardInput:
    return ForwardBackwardInput([], loss_fn, config)


def example(start: int, stop: int) -> TrainingExample:
    rows = np.arange(stop - start)
    inputs = {"logprobs": SAMPLED[start:stop], "advantages": ADVANTAGES[start:stop]}
    return TrainingExample(tokens=rows, targets=rows, rows=rows, shape=rows.shape, inputs=inputs)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_grad_matches_finite_differences(name: str) -> None:
    weights = np.array([0.0, 1.0, 0.5, 2.0, 1.0])
    grad = loss_of(name, weights=weights).grad_P
    for index in range(len(NOW)):
        nudge = np.zeros_like(NOW)
        nudge[index] = 1e-6
        up = loss_of(name, NOW + nudge, weights=weights).value
        down = loss_of(name, NOW - nudge, weights=weights).value
        assert grad[index] == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-6)


def test_cross_entropy_without_weights_uses_weight_one() -> None:
    assert loss_of("cross_entropy").value == pytest.approx(-NOW.sum())


def test_ppo_clipped_tokens_have_zero_grad() -> None:
    ratio = np.exp(NOW - SAMPLED)
    held = np.clip(ratio, 0.8, 1.2)
    loss = loss_of("ppo")
    assert loss.value == pytest.approx(-np.minimum(ratio * ADVANTAGES, held * ADVANTAGES).sum())
    # The second ratio fell below 0.8 with a negative advantage, the fourth rose above 1.2.
    assert loss.grad_P[1] == 0.0
    assert loss.grad_P[3] == 0.0
    assert loss.grad_P[0] == pytest.approx(-ratio[0])


def test_clip_bounds_precedence_is_inputs_config_defaults() -> None:
    by_config = loss_of("ppo", config={"clip_low_threshold": 0.5, "clip_high_threshold": 2.0})
    assert (by_config.grad_P != 0.0).all()
    tight = np.full(5, 1.0)
    by_input = loss_of(
        "ppo",
        config={"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
        clip_low_threshold=tight,
        clip_high_threshold=tight,
    )
    assert by_input.value == pytest.approx(
        -np.minimum(np.exp(NOW - SAMPLED) * ADVANTAGES, ADVANTAGES).sum()
    )


def test_cispo_does_not_differentiate_clipped_ratio() -> None:
    held = np.clip(np.exp(NOW - SAMPLED), 0.0, 1.1)
    loss = loss_of("cispo", config={"clip_high_threshold": 1.1})
    assert loss.value == pytest.approx(-(held * NOW * ADVANTAGES).sum())
    np.testing.assert_allclose(loss.grad_P, -held * ADVANTAGES)


def test_gspo_has_one_masked_ratio_per_example() -> None:
    mask = np.array([1.0, 1.0, 0.0, 1.0, 1.0])
    drift = NOW - SAMPLED
    ratios = np.repeat(np.exp([drift[:2].mean(), drift[3:].mean()]), [3, 2])
    loss = loss_of(
        "gspo",
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 9.0},
        sequence_ratio_mask=mask,
    )
    assert loss.value == pytest.approx(-(ratios * ADVANTAGES).sum())
    np.testing.assert_allclose(loss.grad_P, -ratios * ADVANTAGES)


def stable_loss(now: np.ndarray, kl_coeff: float = 0.01, **inputs: np.ndarray) -> LossValue:
    given = {"is_sampled": np.ones(5), **inputs}
    return loss_of("stable_reinforce", now, {"kl_coeff": kl_coeff}, **given)


def test_stable_reinforce_is_reinforce_without_drift() -> None:
    loss = stable_loss(SAMPLED, 5.0)
    assert loss.value == pytest.approx(-(ADVANTAGES * SAMPLED).sum())
    np.testing.assert_array_equal(loss.grad_P, -ADVANTAGES)
    assert loss.metrics == {"ratio:mean": 1.0, "kl:mean": 0.0, "truncated_fraction:mean": 0.0}


@pytest.mark.parametrize("drift", [-100.0, -30.0, -1.0, 0.1, 2.0, np.log(10.0), 3.0, 50.0, 100.0])
def test_stable_reinforce_is_bounded_for_any_drift(drift: float) -> None:
    now = SAMPLED + drift
    policy, penalty = stable_loss(now, 0.0), stable_loss(now, 1.0, advantages=np.zeros(5))
    weight = -policy.grad_P / ADVANTAGES
    assert (weight >= 0.0).all()
    assert (weight <= 1.0).all()
    # Never negative, pulls back towards the sampler, and grows linearly when far above it.
    assert 0.0 < penalty.value < 5 * 9 * 100
    assert (np.sign(penalty.grad_P) == np.sign(drift)).all()
    np.testing.assert_allclose(penalty.grad_P, min(np.exp(drift), 10.0) - 1.0)


def test_stable_reinforce_penalty_grad_matches_finite_differences() -> None:
    now = SAMPLED + np.array([-2.0, 0.3, 2.2, 2.4, 8.0])
    none = np.zeros(5)
    grad = stable_loss(now, 0.7, advantages=none).grad_P
    for index in range(5):
        nudge = np.zeros(5)
        nudge[index] = 1e-6
        up = stable_loss(now + nudge, 0.7, advantages=none).value
        down = stable_loss(now - nudge, 0.7, advantages=none).value
        assert grad[index] == pytest.approx((up - down) / 2e-6, rel=1e-5)


def test_stable_reinforce_ignores_tokens_that_were_not_sampled() -> None:
    mask = np.array([0.0, 0.0, 1.0, 1.0, 1.0])
    made_up = np.array([1e4, -1e4, *SAMPLED[2:]])
    loss = stable_loss(NOW, is_sampled=mask, logprobs=made_up)
    assert loss.grad_P[:2].tolist() == [0.0, 0.0]
    assert loss.num_counted == 3
    assert loss.metrics["ratio:mean"] == pytest.approx(np.exp(NOW - SAMPLED)[2:].mean())
    assert loss.metrics["truncated_fraction:mean"] == pytest.approx(2 / 3)


def test_overflowing_ratio_is_infinite_without_warning() -> None:
    loss = loss_of("importance_sampling", NOW + 1000.0, advantages=np.ones(5))
    assert loss.value == -np.inf


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_placeholder_logprob_is_ignored_without_advantage(name: str) -> None:
    made_up = np.array([-1e4, -1e4, -1e4, -1.5, -0.7])
    advantages = np.array([0.0, 0.0, 0.0, 0.5, -0.5])
    loss = loss_of(name, logprobs=made_up, advantages=advantages)
    assert np.isfinite(loss.value)
    assert loss.grad_P[:3].tolist() == [0.0, 0.0, 0.0]
    assert loss.metrics["ratio:mean"] < 2.0


def test_metrics_cover_pairs_with_advantage() -> None:
    advantages = np.array([1.0, -1.0, 0.0, 0.5, 0.0])
    loss = loss_of("ppo", advantages=advantages)
    ratio = np.exp(NOW - SAMPLED)
    assert loss.num_counted == 3
    assert loss.metrics == {
        "ratio:mean": pytest.approx(ratio[[0, 1, 3]].mean()),
        "clip_fraction:mean": pytest.approx(2 / 3),
    }
    assert loss_of("cispo", config={"clip_high_threshold": 1.1}).metrics[
        "clip_fraction:mean"
    ] == pytest.approx(2 / 5)


def test_metrics_without_any_advantage() -> None:
    loss = loss_of("ppo", advantages=np.zeros(5))
    assert loss.metrics == {"ratio:mean": 1.0, "clip_fraction:mean": 0.0}
    assert loss.num_counted == 0
    assert sum_metrics([loss])["ratio:mean"] == 1.0


def test_overflowing_ratio_gives_finite_loss_and_metric() -> None:
    loss = loss_of("ppo", NOW + 1000.0, advantages=np.ones(5))
    assert loss.value == pytest.approx(-5 * 1.2)
    assert np.isfinite(loss.metrics["ratio:mean"])


def test_losses_of_parts_sum_to_total() -> None:
    request = work("ppo")
    examples = [example(0, 3), example(3, 5)]
    logprobs = [NOW[:3].astype(np.float32), NOW[3:].astype(np.float32)]
    whole = compute_loss(request, examples, logprobs)
    parts = [compute_loss(request, [examples[i]], [logprobs[i]]) for i in (1, 0)]
    np.testing.assert_array_equal(whole.grad_P, np.concatenate([parts[1].grad_P, parts[0].grad_P]))
    assert sum_metrics(parts) == pytest.approx(sum_metrics([whole]))
    assert sum_metrics(parts).keys() == {"loss:sum", "ratio:mean", "clip_fraction:mean"}


def test_loss_of_no_examples_is_zero() -> None:
    empty = compute_loss(work("ppo"), [], [])
    assert (empty.value, empty.grad_P.size) == (0.0, 0)
    assert sum_metrics([]) == {"loss:sum": 0.0}


def test_logprobs_may_have_target_shape() -> None:
    rows = np.repeat(np.arange(2), 2)
    square = TrainingExample(tokens=rows[:2], targets=rows, rows=rows, shape=(2, 2), inputs={})
    loss = compute_loss(work("cross_entropy"), [square], [np.full((2, 2), -0.5)])
    assert (loss.value, loss.grad_P.tolist()) == (2.0, [-1.0] * 4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mse", "'mse' is not one of cross_entropy, importance_sampling, ppo, cispo, dro, gspo"),
        ("mae", "gspo, stable_reinforce, custom$"),
    ],
)
def test_unsupported_loss_raises(name: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        get_loss(name)


@pytest.mark.parametrize(
    ("loss_fn", "config", "reason"),
    [
        ("ppo", {"beta": 1.0}, "has 'beta', but ppo takes clip_low_threshold, clip_high_thresh"),
        ("cross_entropy", {"beta": 1.0}, "'beta', but cross_entropy takes no settings"),
        ("dro", {"beta": "big"}, r"\['beta'\] must be a finite number, got 'big'"),
        ("dro", {"beta": float("nan")}, "must be a finite number, got nan"),
        ("cispo", {"clip_high_threshold": float("inf")}, "must be a finite number, got inf"),
        ("dro", {"beta": None}, "must be a finite number, got None"),
        ("stable_reinforce", {"beta": 1.0}, "has 'beta', but stable_reinforce takes kl_coeff"),
    ],
)
def test_invalid_loss_setting_is_named(loss_fn: str, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse_loss_config(work(loss_fn, config))


def test_missing_loss_settings_use_defaults() -> None:
    assert parse_loss_config(work("ppo", {"clip_high_threshold": 3})) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 3.0,
    }
    assert parse_loss_config(work("dro")) == {"beta": 0.05}


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (LossValue(np.inf, np.zeros(1)), "the ppo loss is inf; check its inputs"),
        (LossValue(np.nan, np.zeros(1)), "the ppo loss is nan; check its inputs"),
        (LossValue(1.0, np.array([0.0, -1e39])), r"changes by 1e\+39 per log-probability"),
        (LossValue(1.0, np.array([np.nan])), "the gradient is not finite"),
    ],
)
def test_non_finite_loss_raises(loss: LossValue, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        check_loss("ppo", loss)


def test_finite_loss_passes() -> None:
    check_loss("ppo", LossValue(1.0, np.array([-3.0, 1e38])))
