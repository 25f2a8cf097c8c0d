"""The `dimuon` step against its definition, in float64, and its properties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinkex.nn.adamw import NonFiniteGradient
from tinkex.nn.lora_layout import LoraLayout, LoraTarget, TargetKind
from tinkex.nn.muon import dimuon_step
from tinkex.types import DimuonParams

RANK = 4
TARGETS = (
    LoraTarget(kind=TargetKind.ATTENTION, paths=("q", "k"), in_features=24, out_features=(16, 2)),
    LoraTarget(
        kind=TargetKind.MLP, paths=("e.up",), in_features=24, out_features=(40,), num_experts=3
    ),
)
LAYOUT = LoraLayout(TARGETS, RANK, set(TargetKind))


def random(seed: int, scale: float = 1.0) -> Tensor:
    """A buffer with random matrices and zeros between them."""
    flat = torch.zeros(LAYOUT.size)
    generator = torch.Generator().manual_seed(seed)
    for matrix in matrices(flat):
        matrix.copy_(torch.randn(matrix.shape, generator=generator) * scale)
    return flat


def matrices(flat: Tensor) -> list[Tensor]:
    """The A and B of every module and expert."""
    return [
        matrix
        for pair in LAYOUT.pairs(flat)
        for side in (pair.down, pair.up)
        for matrix in (side if side.ndim == 3 else side.unsqueeze(0))
    ]


def expected_direction(momentum: Tensor, damping: float) -> Tensor:
    """The definition in `docs/losses.md`, with a loop for every step."""
    m = momentum.double()
    rows, columns = m.square().mean(1), m.square().mean(0)
    left = (rows / rows.mean() + damping).pow(-0.25).diag()
    right = (columns / columns.mean() + damping).pow(-0.25).diag()
    x = left @ m @ right
    x = x / x.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x * RANK**0.5 / x.norm()


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e20])
def test_step_matches_definition(scale: float) -> None:
    weights, gradient = random(1), random(2, scale)
    momentum = random(3, scale)
    before, mixed = weights.clone(), 0.8 * momentum + 0.2 * gradient
    params = DimuonParams(
        learning_rate=0.1, beta1=0.8, damping=0.01, rank_lr_correction_exponent=0.5
    )
    metrics = dimuon_step(weights, gradient, momentum, 3, params, LAYOUT)
    torch.testing.assert_close(momentum, mixed, rtol=1e-5, atol=1e-6 * scale)
    for new, old, source in zip(*map(matrices, (weights, before, mixed)), strict=True):
        wanted = old.double() - 0.1 * 8**0.5 * expected_direction(source, 0.01)
        torch.testing.assert_close(new.double(), wanted, rtol=1e-4, atol=1e-4)
    num_matrices = len(matrices(weights))
    assert metrics["update_norm"] == pytest.approx(0.1 * 8**0.5 * (RANK * num_matrices) ** 0.5)
    assert metrics["step"] == 3
    assert metrics["clipped"] == 0.0


def test_every_matrix_is_updated_on_its_own() -> None:
    """Also those of experts: the gradient of one does not change the update of another."""
    params = DimuonParams(learning_rate=0.1)
    results = []
    for factor in (1.0, 100.0):
        weights, gradient = random(1), random(2)
        matrices(gradient)[-1].mul_(factor).add_(factor)
        dimuon_step(weights, gradient, torch.zeros_like(weights), 1, params, LAYOUT)
        results.append(weights)
    same = [torch.equal(a, b) for a, b in zip(*map(matrices, results), strict=True)]
    assert same == [True] * (len(same) - 1) + [False]


def test_matrix_without_gradient_keeps_its_bits() -> None:
    weights, gradient = random(1), random(2)
    before = weights.clone()
    for pair in LAYOUT.pairs(gradient):
        pair.down.zero_()
    dimuon_step(
        weights, gradient, torch.zeros_like(weights), 1, DimuonParams(learning_rate=0.1), LAYOUT
    )
    for new, old in zip(LAYOUT.pairs(weights), LAYOUT.pairs(before), strict=True):
        assert torch.equal(new.down, old.down)
        assert not torch.equal(new.up, old.up)
    assert weights.isfinite().all()


def test_clipping_scales_the_momentum() -> None:
    gradient, momentum = random(2), torch.zeros(LAYOUT.size)
    norm = float(gradient.norm())
    params = DimuonParams(learning_rate=0.1, beta1=0.5, grad_clip_norm=norm / 4)
    metrics = dimuon_step(random(1), gradient, momentum, 1, params, LAYOUT)
    assert metrics["clipped"] == 1.0
    assert metrics["grad_norm"] == pytest.approx(norm)
    assert float(momentum.norm()) == pytest.approx(norm / 8, rel=1e-4)


def test_non_finite_gradient_changes_nothing() -> None:
    weights, gradient, momentum = random(1), random(2), random(3)
    matrices(gradient)[0][0, 0] = float("nan")
    before = weights.clone(), momentum.clone()
    params = DimuonParams(learning_rate=0.1)
    with pytest.raises(NonFiniteGradient):
        dimuon_step(weights, gradient, momentum, 1, params, LAYOUT)
    assert torch.equal(weights, before[0])
    assert torch.equal(momentum, before[1])
