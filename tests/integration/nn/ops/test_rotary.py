from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from tests.integration.nn.ops.gradient_checks import (
    Outputs,
    assert_matches,
    assert_same_bits_for_any_threads,
    random,
)
from tinkex.nn.ops.rms_norm import FrozenRMSNorm
from tinkex.nn.ops.rotary import (
    HeadLayout,
    QKRotary,
    RotaryAngles,
    signed_sin,
    split_frozen_qkv_rotary,
    split_qkv_rotary,
)

EPS = 1e-6
ROWS, QUERIES, KEYS, HEAD = 67, 4, 2, 16


def cos_sin(num_rows: int = ROWS) -> tuple[Tensor, Tensor]:
    angles = random(num_rows, 1, HEAD // 2)
    return angles.cos(), angles.sin()


def expected_qkv(qkv: Tensor, *weights: Tensor) -> Outputs:
    cos, sin = (x.to(qkv.dtype) for x in cos_sin(len(qkv)))
    q, k, v = qkv.split([QUERIES, KEYS, KEYS], dim=1)
    if weights:
        pairs = zip((q, k), weights, strict=True)
        q, k = (rms_norm(x, (HEAD,), weight.to(x.dtype), EPS) for x, weight in pairs)
    rotated = []
    for x in (q, k):
        first, second = x.chunk(2, -1)
        rotated.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
    return (*rotated, v)


def trainable_split(qkv: Tensor, *weights: Tensor) -> Outputs:
    q_weight, k_weight = weights or (None, None)
    return split_qkv_rotary(
        qkv, QKRotary(QUERIES, KEYS, EPS, *cos_sin(len(qkv)), q_weight, k_weight)
    )


@pytest.mark.parametrize("has_norms", [True, False])
def test_split_qkv_rotary_matches_formula(has_norms: bool, implementation: str) -> None:
    weights = (random(HEAD), random(HEAD, seed=1)) if has_norms else ()
    qkv = random(ROWS, QUERIES + 2 * KEYS, HEAD)
    rotary = QKRotary(QUERIES, KEYS, EPS, *cos_sin(), None, None)
    assert rotary.can_use_kernel(qkv) == (implementation == "kernel")
    assert_matches(trainable_split, expected_qkv, (qkv, *weights))


def test_thread_count_does_not_change_bits() -> None:
    inputs = (random(700, QUERIES + 2 * KEYS, HEAD), random(HEAD), random(HEAD, seed=1))
    assert_same_bits_for_any_threads(trainable_split, inputs)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("num_rows", [1, 200])
def test_frozen_split_matches_formula(num_rows: int, has_norms: bool) -> None:
    qkv = random(num_rows, QUERIES + 2 * KEYS, HEAD)
    weights = (random(HEAD), random(HEAD, seed=1)) if has_norms else ()
    expanded = [w.expand(n, -1) for w, n in zip(weights, (QUERIES, KEYS), strict=False)]
    norm = FrozenRMSNorm(torch.cat(expanded), EPS) if has_norms else None
    layout = HeadLayout(QUERIES, KEYS, norm)
    cos, sin = cos_sin(num_rows)
    angles = RotaryAngles(torch.cat((cos, cos), -1), signed_sin(torch.cat((sin, sin), -1)))
    assert_matches(
        lambda x: split_frozen_qkv_rotary(x, layout, angles),
        lambda x: expected_qkv(x, *weights),
        (qkv,),
    )
    expected = expected_qkv(qkv.double(), *weights)
    with torch.no_grad():
        actual = split_frozen_qkv_rotary(qkv, layout, angles)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
