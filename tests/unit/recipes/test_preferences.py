from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.recipes.dpo import dpo_loss

SCORES = st.floats(-50.0, 0.0)
BETAS = st.floats(0.01, 2.0)


def test_loss_without_a_margin_is_log_two() -> None:
    found = dpo_loss((-3.0, -4.0), (-3.0, -4.0), 0.1)
    assert found.loss == pytest.approx(math.log(2.0))
    assert (found.margin, found.loss_grad) == (0.0, 0.05)


@given(SCORES, SCORES, SCORES, SCORES, BETAS)
def test_loss_grad_is_the_derivative_of_the_loss(
    chosen: float, rejected: float, chosen_0: float, rejected_0: float, beta: float
) -> None:
    reference, tiny = (chosen_0, rejected_0), 1e-5

    def loss(by_chosen: float, by_rejected: float) -> float:
        return dpo_loss((chosen + by_chosen, rejected + by_rejected), reference, beta).loss

    loss_grad = dpo_loss((chosen, rejected), reference, beta).loss_grad
    assert (loss(-tiny, 0) - loss(tiny, 0)) / (2 * tiny) == pytest.approx(loss_grad, abs=1e-4)
    assert (loss(0, tiny) - loss(0, -tiny)) / (2 * tiny) == pytest.approx(loss_grad, abs=1e-4)


def test_large_margins_do_not_overflow() -> None:
    good, bad = dpo_loss((0.0, -1e6), (0.0, 0.0), 1.0), dpo_loss((-1e6, 0.0), (0.0, 0.0), 1.0)
    assert (good.loss, good.loss_grad) == (0.0, 0.0)
    assert (bad.loss, bad.loss_grad) == (1e6, 1.0)
