"""AdamW on flat buffers takes the steps that torch takes, and refuses what would spoil them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tinkex.errors import InvalidInput
from tinkex.nn import adamw
from tinkex.nn.adamw import NonFiniteGradient, adamw_step
from tinkex.types import AdamParams

#: Not a multiple of the block that tests set.
SIZE = 1003


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "_BLOCK", 128)


def drawn(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass
class Buffers:
    """What a step changes."""

    weights: Tensor = field(default_factory=lambda: drawn(0))
    first: Tensor = field(default_factory=lambda: torch.zeros(SIZE))
    second: Tensor = field(default_factory=lambda: torch.zeros(SIZE))

    def step(
        self, gradient: Tensor | None, number: int, params: AdamParams, *, is_lax: bool = False
    ) -> dict[str, float]:
        metrics = adamw_step(
            self.weights, gradient, self.first, self.second, number, params, apply_nonfinite=is_lax
        )
        return dict(metrics)

    def copied(self) -> list[Tensor]:
        return [self.weights.clone(), self.first.clone(), self.second.clone()]

    def equals(self, others: list[Tensor]) -> bool:
        return all(map(torch.equal, (self.weights, self.first, self.second), others))


PARAMS = {
    "defaults": AdamParams(),
    "decay": AdamParams(learning_rate=0.02, weight_decay=0.3, beta2=0.999, eps=1e-8),
    "large eps": AdamParams(learning_rate=0.05, eps=0.5, beta1=0.5),
    "no momentum": AdamParams(learning_rate=0.01, beta1=0.0, beta2=0.0, eps=1e-3),
    "clip": AdamParams(learning_rate=0.02, weight_decay=0.1, grad_clip_norm=0.7),
}


@pytest.mark.parametrize("name", PARAMS)
def test_twenty_steps_equal_torchs(name: str) -> None:
    params = PARAMS[name]
    mine, theirs = Buffers(), torch.nn.Parameter(drawn(0))
    torchs = torch.optim.AdamW(
        [theirs],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        foreach=False,
    )
    for number in range(1, 21):
        # Some are below the norm to clip at, some above.
        gradient = drawn(number, scale=0.003 * number)
        theirs.grad = gradient.clone()
        norm = float(theirs.grad.norm())
        if params.grad_clip_norm:
            norm = float(torch.nn.utils.clip_grad_norm_([theirs], params.grad_clip_norm))
        before = theirs.detach().clone()
        torchs.step()

        metrics = mine.step(gradient, number, params)
        torch.testing.assert_close(mine.weights, theirs.detach(), rtol=1e-6, atol=1e-6)
        assert metrics == pytest.approx(
            {
                "grad_norm": norm,
                "learning_rate": params.learning_rate,
                "param_norm": float(theirs.detach().norm()),
                "update_norm": float((theirs.detach() - before).norm()),
                "step": number,
                "clipped": float(0.0 < params.grad_clip_norm < norm),
                "has_gradient": 1.0,
            },
            rel=1e-4,
        )
    state = torchs.state[theirs]
    torch.testing.assert_close(mine.first, state["exp_avg"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.second, state["exp_avg_sq"], rtol=1e-6, atol=1e-6)


def test_gradients_on_both_sides_of_the_clip_norm_were_tried() -> None:
    norms = [float(drawn(number, scale=0.003 * number).norm()) for number in range(1, 21)]
    assert min(norms) < PARAMS["clip"].grad_clip_norm < max(norms)


def test_a_clipped_gradient_has_the_norm_it_is_clipped_to() -> None:
    mine = Buffers()
    metrics = mine.step(drawn(1, 50.0), 1, AdamParams(grad_clip_norm=2.0, beta1=0.0))
    assert metrics["grad_norm"] == pytest.approx(float(drawn(1, 50.0).norm()), rel=1e-5)
    assert metrics["clipped"] == 1.0
    assert float(mine.first.norm()) == pytest.approx(2.0, rel=1e-5)


def test_a_step_without_a_gradient_changes_nothing_and_does_not_count() -> None:
    mine = Buffers()
    mine.step(drawn(1), 1, PARAMS["decay"])
    before = mine.copied()
    metrics = mine.step(None, 2, PARAMS["decay"])
    assert mine.equals(before)
    assert metrics == {
        "grad_norm": 0.0,
        "learning_rate": 0.02,
        "param_norm": pytest.approx(float(mine.weights.norm()), rel=1e-6),
        "update_norm": 0.0,
        "step": 1.0,
        "clipped": 0.0,
        "has_gradient": 0.0,
    }


def test_a_gradient_of_zeros_is_a_step() -> None:
    mine = Buffers()
    metrics = mine.step(torch.zeros(SIZE), 1, PARAMS["decay"])
    torch.testing.assert_close(mine.weights, drawn(0) * (1.0 - 0.02 * 0.3))
    assert (metrics["step"], metrics["grad_norm"], metrics["has_gradient"]) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_refused_before_anything_changes(
    bad: float, clip: float
) -> None:
    mine, gradient = Buffers(), drawn(1)
    mine.step(drawn(2), 1, PARAMS["decay"])
    before = mine.copied()
    gradient[SIZE - 1] = bad
    kept = gradient.clone()
    with pytest.raises(NonFiniteGradient, match="the gradient of step 2 has NaN or infinity"):
        mine.step(gradient, 2, AdamParams(grad_clip_norm=clip))
    assert mine.equals(before)
    assert torch.equal(gradient.nan_to_num(7.0), kept.nan_to_num(7.0))
    assert issubclass(NonFiniteGradient, InvalidInput)


def test_a_gradient_that_is_not_finite_is_applied_if_that_is_wished() -> None:
    mine, gradient = Buffers(), drawn(1)
    gradient[5] = math.nan
    metrics = mine.step(gradient, 1, AdamParams(), is_lax=True)
    assert math.isnan(metrics["grad_norm"])
    assert mine.weights[5].isnan()
    assert mine.weights[:5].isfinite().all()


def test_a_gradient_too_large_to_square_has_its_norm_and_is_clipped() -> None:
    mine = Buffers()
    metrics = mine.step(drawn(1) * 1e30, 1, AdamParams(grad_clip_norm=3.0, beta1=0.0))
    assert metrics["grad_norm"] == pytest.approx(float(drawn(1).norm()) * 1e30, rel=1e-5)
    assert float(mine.first.norm()) == pytest.approx(3.0, rel=1e-5)


def test_an_eps_below_float32_divides_nothing_by_zero() -> None:
    mine = Buffers()
    gradient = drawn(1)
    gradient[::2] = 0.0
    mine.step(gradient, 1, AdamParams(eps=1e-300))
    assert mine.weights.isfinite().all()
    assert torch.equal(mine.weights[::2], drawn(0)[::2])


def test_the_same_steps_give_the_same_bits() -> None:
    def run() -> list[Tensor]:
        mine = Buffers()
        for number in range(1, 6):
            mine.step(drawn(number), number, PARAMS["clip"])
        return mine.copied()

    assert all(map(torch.equal, run(), run()))


def test_a_late_step_is_corrected_as_one() -> None:
    mine, first, second = Buffers(), drawn(3, 0.01), drawn(4, 0.01).square()
    mine.first, mine.second = first.clone(), second.clone()
    params, gradient = PARAMS["decay"], drawn(5)
    mine.step(gradient.clone(), 1000, params)
    first = params.beta1 * first + (1 - params.beta1) * gradient
    second = params.beta2 * second + (1 - params.beta2) * gradient.square()
    mean = first / (1 - params.beta1**1000)
    scale = (second / (1 - params.beta2**1000)).sqrt() + params.eps
    wanted = drawn(0) * (1 - params.learning_rate * params.weight_decay)
    wanted = wanted - params.learning_rate * mean / scale
    torch.testing.assert_close(mine.weights, wanted, rtol=1e-6, atol=1e-6)
