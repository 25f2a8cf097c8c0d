from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.integration.nn.ops.gradient_checks import (
    assert_matches,
    random,
)
from tinkex.nn.ops.cross_entropy import weighted_cross_entropy

ROWS, WIDTH, VOCAB = 67, 24, 40


@pytest.mark.usefixtures("implementation")
def test_weighted_cross_entropy_matches_formula() -> None:
    targets, weights = torch.arange(ROWS) % VOCAB, random(ROWS).abs()
    assert_matches(
        lambda hidden, weight: (weighted_cross_entropy(hidden, weight, targets, weights),),
        lambda hidden, weight: (
            (cross_entropy(hidden @ weight.t(), targets, reduction="none") * weights).sum(),
        ),
        (random(ROWS, WIDTH) * 3.0, random(VOCAB, WIDTH)),
        tolerance=1e-4,
    )


@pytest.mark.usefixtures("implementation")
def test_nan_propagates() -> None:
    hidden = random(ROWS, WIDTH)
    hidden[3, 5] = float("nan")
    targets = torch.zeros(ROWS, dtype=torch.int64)
    weight = random(VOCAB, WIDTH)
    assert weighted_cross_entropy(hidden, weight, targets, torch.ones(ROWS)).isnan()
