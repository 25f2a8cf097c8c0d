from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from tests.integration.nn.ops.gradient_checks import (
    assert_matches,
    assert_same_bits_for_any_threads,
    random,
)
from tinkex.nn.ops.swiglu import ACTIVATIONS, SILU, gated_activation_inference, swiglu

ROWS, WIDTH = 67, 24


@pytest.mark.usefixtures("implementation")
def test_swiglu_matches_formula() -> None:
    gate_up = random(ROWS, 2 * WIDTH) * 20.0
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    assert_matches(
        lambda x: (swiglu(x),),
        lambda x: (silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],),
        (gate_up,),
    )


def test_thread_count_does_not_change_bits() -> None:
    assert_same_bits_for_any_threads(lambda x: (swiglu(x),), (random(2048, 2 * WIDTH),))


@pytest.mark.usefixtures("implementation")
def test_inference_matches_formula() -> None:
    gate = torch.tensor([0.0, -0.0, 1.0, -1.0, 30.0, -30.0, 100.0, -100.0] * 2)
    up = random(16)
    actual = gated_activation_inference(torch.cat((gate, up)).unsqueeze(0), SILU)[0]
    expected = silu(gate.double()) * up.double()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-35)
    many = random(300, 2 * 64, seed=1)
    for activation in ACTIVATIONS:
        wide_gate, wide_up = many.double().chunk(2, dim=-1)
        torch.testing.assert_close(
            gated_activation_inference(many, activation).double(),
            activation.forward(wide_gate) * wide_up,
            rtol=1e-5,
            atol=1e-6,
        )


def test_nan_propagates() -> None:
    bad = torch.full((1, 16), float("nan"))
    assert gated_activation_inference(bad, SILU).isnan().all()
