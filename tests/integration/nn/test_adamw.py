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


def random(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass
class Buffers:
    """Buffers that a step updates."""

    weights: Tensor = field(default_factory=lambda: random(0))
    first: Tensor = field(default_factory=lambda: torch.zeros(SIZE))
    second: Tensor = field(default_factory=lambda: torch.zeros(SIZE))

    def step(
        self,
        gradient: Tensor,
        number: int,
        params: AdamParams,
        *,
        apply_nonfinite: bool = False,
    ) -> dict[str, float]:
        metrics = adamw_step(
            self.weights,
            gradient,
            self.first,
            self.second,
            number,
            params,
            apply_nonfinite=apply_nonfinite,
        )
        return dict(metrics)

    def copies(self) -> list[Tensor]:
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
def test_twenty_steps_match_torch(name: str) -> None:
    params = PARAMS[name]
    buffers, parameter = Buffers(), torch.nn.Parameter(random(0))
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        foreach=False,
    )
    for number in range(1, 21):
        # Some norms are below the clip norm, some above.
        gradient = random(number, scale=0.003 * number)
        parameter.grad = gradient.clone()
        norm = float(parameter.grad.norm())
        if params.grad_clip_norm:
            norm = float(torch.nn.utils.clip_grad_norm_([parameter], params.grad_clip_norm))
        before = parameter.detach().clone()
        optimizer.step()

        metrics = buffers.step(gradient, number, params)
        torch.testing.assert_close(buffers.weights, parameter.detach(), rtol=1e-6, atol=1e-6)
        assert metrics == pytest.approx(
            {
                "grad_norm": norm,
                "learning_rate": params.learning_rate,
                "param_norm": float(parameter.detach().norm()),
                "update_norm": float((parameter.detach() - before).norm()),
                "step": number,
                "clipped": float(0.0 < params.grad_clip_norm < norm),
                "has_gradient": 1.0,
            },
            rel=1e-4,
        )
    state = optimizer.state[parameter]
    torch.testing.assert_close(buffers.first, state["exp_avg"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(buffers.second, state["exp_avg_sq"], rtol=1e-6, atol=1e-6)


def test_gradients_cover_both_sides_of_the_clip_norm() -> None:
    norms = [float(random(number, scale=0.003 * number).norm()) for number in range(1, 21)]
    assert min(norms) < PARAMS["clip"].grad_clip_norm < max(norms)


def test_clipped_gradient_has_the_clip_norm() -> None:
    buffers = Buffers()
    metrics = buffers.step(random(1, 50.0), 1, AdamParams(grad_clip_norm=2.0, beta1=0.0))
    assert metrics["grad_norm"] == pytest.approx(float(random(1, 50.0).norm()), rel=1e-5)
    assert metrics["clipped"] == 1.0
    assert float(buffers.first.norm()) == pytest.approx(2.0, rel=1e-5)


def test_zero_gradient_is_a_step() -> None:
    buffers = Buffers()
    metrics = buffers.step(torch.zeros(SIZE), 1, PARAMS["decay"])
    torch.testing.assert_close(buffers.weights, random(0) * (1.0 - 0.02 * 0.3))
    assert (metrics["step"], metrics["grad_norm"], metrics["has_gradient"]) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_nonfinite_gradient_is_rejected_before_any_change(bad: float, clip: float) -> None:
    buffers, gradient = Buffers(), random(1)
    buffers.step(random(2), 1, PARAMS["decay"])
    before = buffers.copies()
    gradient[SIZE - 1] = bad
    original = gradient.clone()
    with pytest.raises(NonFiniteGradient, match="the gradient of step 2 has NaN or infinity"):
        buffers.step(gradient, 2, AdamParams(grad_clip_norm=clip))
    assert buffers.equals(before)
    assert torch.equal(gradient.nan_to_num(7.0), original.nan_to_num(7.0))
    assert issubclass(NonFiniteGradient, InvalidInput)


def test_nonfinite_gradient_is_applied_on_request() -> None:
    buffers, gradient = Buffers(), random(1)
    gradient[5] = math.nan
    metrics = buffers.step(gradient, 1, AdamParams(), apply_nonfinite=True)
    assert math.isnan(metrics["grad_norm"])
    assert buffers.weights[5].isnan()
    assert buffers.weights[:5].isfinite().all()


def test_gradient_whose_square_overflows_is_clipped() -> None:
    buffers = Buffers()
    metrics = buffers.step(random(1) * 1e30, 1, AdamParams(grad_clip_norm=3.0, beta1=0.0))
    assert metrics["grad_norm"] == pytest.approx(float(random(1).norm()) * 1e30, rel=1e-5)
    assert float(buffers.first.norm()) == pytest.approx(3.0, rel=1e-5)


def test_eps_below_float32_does_not_divide_by_zero() -> None:
    buffers = Buffers()
    gradient = random(1)
    gradient[::2] = 0.0
    buffers.step(gradient, 1, AdamParams(eps=1e-300))
    assert buffers.weights.isfinite().all()
    assert torch.equal(buffers.weights[::2], random(0)[::2])


def test_steps_are_bit_identical() -> None:
    def run() -> list[Tensor]:
        buffers = Buffers()
        for number in range(1, 6):
            buffers.step(random(number), number, PARAMS["clip"])
        return buffers.copies()

    assert all(map(torch.equal, run(), run()))


def test_late_step_uses_its_bias_correction() -> None:
    buffers, first, second = Buffers(), random(3, 0.01), random(4, 0.01).square()
    buffers.first, buffers.second = first.clone(), second.clone()
    params, gradient = PARAMS["decay"], random(5)
    buffers.step(gradient.clone(), 1000, params)
    first = params.beta1 * first + (1 - params.beta1) * gradient
    second = params.beta2 * second + (1 - params.beta2) * gradient.square()
    mean = first / (1 - params.beta1**1000)
    scale = (second / (1 - params.beta2**1000)).sqrt() + params.eps
    expected = random(0) * (1 - params.learning_rate * params.weight_decay)
    expected = expected - params.learning_rate * mean / scale
    torch.testing.assert_close(buffers.weights, expected, rtol=1e-6, atol=1e-6)
