"""The bigram model: probabilities, gradients by finite differences, optimizer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tinkex.engine.fake.bigram import Bigram, BigramTrainer, Moments, OptimStepParams
from tinkex.errors import InvalidInput


def random_model(size: int = 6, seed: int = 0) -> Bigram:
    return Bigram(np.random.default_rng(seed).normal(size=(size, size)))


def test_rows_sum_to_one() -> None:
    model = Bigram.base("tinkex/bigram")
    assert model.logits_VV.shape == (512, 512)
    np.testing.assert_allclose(model.probs_VV.sum(axis=1), 1.0)
    np.testing.assert_allclose(np.exp(model.logprobs_VV), model.probs_VV)


def test_base_model_depends_on_its_name() -> None:
    assert np.array_equal(Bigram.base("a").logits_VV, Bigram.base("a").logits_VV)
    assert not np.array_equal(Bigram.base("a").logits_VV, Bigram.base("b").logits_VV)


def test_weights_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        random_model().logits_VV[0, 0] = 1.0


def test_extreme_logits_stay_finite() -> None:
    model = Bigram(np.array([[1000.0, -1000.0], [0.0, 0.0]]))
    assert model.logprobs_VV[0, 0] == 0.0
    assert model.logprobs_VV[0, 1] == -2000.0


def test_gradient_matches_finite_differences() -> None:
    model = random_model()
    previous, following = np.array([0, 1, 1, 5]), np.array([2, 3, 3, 0])
    grad = np.array([0.5, -1.0, 2.0, 0.25])

    def loss(logits: np.ndarray) -> float:
        return float(grad @ Bigram(logits).logprobs_VV[previous, following])

    numeric = np.zeros_like(model.logits_VV)
    for cell in np.ndindex(numeric.shape):
        nudge = np.zeros_like(numeric)
        nudge[cell] = 1e-6
        numeric[cell] = (loss(model.logits_VV + nudge) - loss(model.logits_VV - nudge)) / 2e-6
    np.testing.assert_allclose(
        model.gradient(previous, following, grad), numeric, rtol=1e-5, atol=1e-8
    )


def test_gradients_accumulate_until_step() -> None:
    trainer = BigramTrainer(random_model())
    trainer.accumulate(np.full((6, 6), 1.0))
    trainer.accumulate(np.full((6, 6), 2.0))
    metrics = trainer.adamw_step(OptimStepParams(learning_rate=0.1))
    assert metrics == {
        "grad_norm": pytest.approx(18.0),
        "learning_rate": 0.1,
        "param_norm": pytest.approx(np.linalg.norm(trainer.model.logits_VV)),
        "update_norm": pytest.approx(0.6),
        "step": 1.0,
        "has_gradient": 1.0,
    }
    again = trainer.adamw_step(OptimStepParams(learning_rate=0.1))
    assert (again["grad_norm"], again["has_gradient"]) == (0.0, 0.0)


@pytest.mark.parametrize("step", [BigramTrainer.adamw_step, BigramTrainer.momentum_step])
@pytest.mark.parametrize(
    ("gradient", "learning_rate", "reason"),
    [(np.inf, 0.1, "norm is inf"), (np.nan, 0.1, "norm is nan"), (1.0, 1e100, "overflows")],
)
def test_overflowing_step_is_rejected_without_changes(
    step: Callable[[BigramTrainer, OptimStepParams], object],
    gradient: float,
    learning_rate: float,
    reason: str,
) -> None:
    trainer = BigramTrainer(random_model())
    trainer.gradient_VV = np.full((6, 6), gradient)
    before = (trainer.model, trainer.moments, trainer.gradient_VV)
    with pytest.raises(InvalidInput, match=reason):
        step(trainer, OptimStepParams(learning_rate=learning_rate))
    assert (trainer.model, trainer.moments, trainer.gradient_VV) == before


def test_adamw_matches_textbook_formula() -> None:
    start = random_model()
    trainer = BigramTrainer(start)
    size = OptimStepParams(
        learning_rate=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5, grad_clip_norm=0.0
    )
    rng = np.random.default_rng(1)
    weights = start.logits_VV.copy()
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    for step in (1, 2, 3):
        gradient = rng.normal(size=weights.shape)
        trainer.accumulate(gradient)
        trainer.adamw_step(size)
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        update = (first / (1 - 0.8**step)) / (np.sqrt(second / (1 - 0.9**step)) + 1e-3)
        weights = weights * (1 - 0.1 * 0.5) - 0.1 * update
    np.testing.assert_allclose(trainer.model.logits_VV, weights)


def test_gradient_clipping_reports_original_norm() -> None:
    clipped, scaled = BigramTrainer(random_model()), BigramTrainer(random_model())
    gradient = np.random.default_rng(2).normal(size=(6, 6))
    norm = float(np.linalg.norm(gradient))
    clipped.accumulate(gradient)
    scaled.accumulate(gradient / norm)
    # A large eps makes the AdamW step depend on the gradient's length.
    metrics = clipped.adamw_step(OptimStepParams(learning_rate=0.1, eps=1.0, grad_clip_norm=1.0))
    scaled.adamw_step(OptimStepParams(learning_rate=0.1, eps=1.0))
    assert metrics["grad_norm"] == pytest.approx(norm)
    np.testing.assert_allclose(clipped.model.logits_VV, scaled.model.logits_VV)


def test_momentum_step_length_is_learning_rate() -> None:
    trainer = BigramTrainer(random_model())
    before = trainer.model.logits_VV
    trainer.accumulate(np.random.default_rng(3).normal(size=(6, 6)))
    trainer.momentum_step(OptimStepParams(learning_rate=0.1))
    moved = trainer.model.logits_VV - before
    assert float(np.sqrt((moved**2).mean())) == pytest.approx(0.1)
    idle = BigramTrainer(random_model())
    idle.momentum_step(OptimStepParams(learning_rate=0.1))
    assert np.array_equal(idle.model.logits_VV, before)


def test_load_with_and_without_moments() -> None:
    trainer = BigramTrainer(random_model())
    trainer.accumulate(np.ones((6, 6)))
    trainer.adamw_step(OptimStepParams(learning_rate=0.1))
    saved = (trainer.model, trainer.moments)
    resumed, fresh = BigramTrainer(random_model(seed=9)), BigramTrainer(random_model(seed=9))
    resumed.accumulate(np.ones((6, 6)))
    resumed.load(*saved)
    fresh.load(saved[0], None)
    assert resumed.gradient_VV is None
    assert resumed.moments.num_steps == 1
    assert fresh.moments == Moments()
