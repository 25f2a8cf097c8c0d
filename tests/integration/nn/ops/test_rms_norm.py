from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from tests.integration.nn.ops.gradient_checks import (
    assert_matches,
    assert_same_bits_for_any_threads,
    random,
)
from tinkex.nn.ops.autograd import can_use_kernels
from tinkex.nn.ops.rms_norm import FrozenRMSNorm, add_rms_norm, rms_norm

EPS = 1e-6
ROWS, WIDTH = 67, 24
INPUTS = (random(ROWS, WIDTH), random(ROWS, WIDTH, seed=1), random(WIDTH))


def expected_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch_rms_norm(x, (WIDTH,), weight, EPS)


@pytest.mark.usefixtures("implementation")
def test_rms_norm_matches_formula() -> None:
    assert_matches(
        lambda x, weight: (rms_norm(x, weight, EPS),),
        lambda x, weight: (expected_norm(x, weight),),
        (INPUTS[0], INPUTS[2]),
    )


@pytest.mark.usefixtures("implementation")
def test_add_rms_norm_matches_formula() -> None:
    assert_matches(
        lambda x, delta, weight: add_rms_norm(x, delta, weight, EPS),
        lambda x, delta, weight: (x + delta, expected_norm(x + delta, weight)),
        INPUTS,
    )


@pytest.mark.usefixtures("implementation")
def test_add_rms_norm_backward_without_residual_grad() -> None:
    assert_matches(
        lambda x, delta, weight: (add_rms_norm(x, delta, weight, EPS)[1],),
        lambda x, delta, weight: (expected_norm(x + delta, weight),),
        INPUTS,
    )


def test_separate_weight_per_head_matches_formula() -> None:
    assert_matches(
        lambda x, weight: (rms_norm(x, weight, EPS),),
        lambda x, weight: (torch_rms_norm(x, (WIDTH,), None, EPS) * weight,),
        (random(ROWS, 3, WIDTH), random(3, WIDTH)),
    )


def test_thread_count_does_not_change_bits() -> None:
    inputs = (random(2048, WIDTH), random(2048, WIDTH, seed=1), random(WIDTH))
    assert_same_bits_for_any_threads(lambda *args: add_rms_norm(*args, EPS), inputs)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("shape", [(1, 8), (3, 24), (1, 5, 576), (700, 64)])
def test_frozen_norm_matches_formula(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    norm = FrozenRMSNorm(weight, EPS)
    wide = x.double()
    expected = torch_rms_norm(wide, shape[-1:], weight.double(), EPS)
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-6, atol=1e-6)
    assert_matches(
        lambda x: (norm(x),),
        lambda x: (torch_rms_norm(x, shape[-1:], weight.double(), EPS),),
        (x,),
    )


def test_frozen_norm_of_a_row_is_independent_of_other_rows() -> None:
    x, norm = random(700, 64), FrozenRMSNorm(random(64), EPS)
    assert torch.equal(norm(x)[-1:], norm(x[-1:]))


def test_nan_propagates() -> None:
    bad = torch.full((1, 16), float("nan"))
    assert FrozenRMSNorm(torch.ones(16), EPS)(bad).isnan().all()


def test_kernels_accept_only_contiguous_float32_of_full_lanes() -> None:
    fine = random(4, 16)
    assert can_use_kernels(fine, fine[:2])
    assert not can_use_kernels(fine.bfloat16())
    assert not can_use_kernels(fine[:, :12]), "not contiguous"
    assert not can_use_kernels(random(4, 12)), "not a multiple of the lanes"
