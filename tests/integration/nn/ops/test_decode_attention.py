"""Samples see what torch's attention would show them, each alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tinkex.nn.forward_context import AttentionOptions
from tinkex.nn.ops.decode_attention import can_use_decode_kernel, decode_attention

CAPACITY = 200


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def looked(
    lengths: list[int], heads: int, key_heads: int, widths: tuple[int, int], how: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the kernel sees, the totals, and what torch sees in float64."""
    num, (key_width, value_width) = len(lengths), widths
    # Rows first in memory, as one product makes queries, keys and values.
    new = drawn(num, heads + key_heads, key_width, seed=1).transpose(0, 1)
    q, k = new[:heads], new[heads:]
    v = drawn(num, key_heads, value_width, seed=2).transpose(0, 1)
    keys = drawn(num, key_heads, CAPACITY, key_width, seed=3)
    values = drawn(num, key_heads, CAPACITY, value_width, seed=4)
    at = np.array(lengths)
    out, totals = decode_attention((q, k, v), keys, values, at.ctypes.data, how)
    wanted = []
    for row, length in enumerate(lengths):
        assert torch.equal(keys[row, :, length], k[:, row]), "the new key is kept"
        assert torch.equal(values[row, :, length], v[:, row])
        first = max(0, length + 1 - how.window) if how.window else 0
        mine = keys[row, :, first : length + 1], values[row, :, first : length + 1]
        wanted.append(
            scaled_dot_product_attention(
                q[:, row : row + 1].double().unsqueeze(0),
                *(x.double().unsqueeze(0) for x in mine),
                scale=how.scaling,
                enable_gqa=True,
            )[0, :, 0]
        )
    return out, totals, torch.stack(wanted)


@pytest.mark.parametrize("lengths", [[0], [5, 0, 63, 64], [127, 128, 199, 1], [30] * 16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (9, 3)])
@pytest.mark.parametrize("window", [None, 1, 50])
def test_samples_see_what_they_should(
    lengths: list[int], heads: tuple[int, int], window: int | None
) -> None:
    found, _, wanted = looked(lengths, *heads, (64, 64), AttentionOptions(0.3, window))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_keys_and_values_may_have_their_own_widths() -> None:
    found, _, wanted = looked([70, 3], 6, 2, (24, 128), AttentionOptions(0.125))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_lse_matches_softmax_denominator() -> None:
    scale = 0.2
    key, query = drawn(1, 1, 16, seed=5), drawn(1, 1, 16, seed=6)
    keys = drawn(1, 1, CAPACITY, 16, seed=7)
    at = np.array([99])
    _, totals = decode_attention(
        (query, key, key), keys, keys.clone(), at.ctypes.data, AttentionOptions(scale)
    )
    scores = keys[0, 0, :100].double() @ query[0, 0].double() * scale
    assert totals.item() == pytest.approx(scores.logsumexp(0).item(), abs=1e-5)


def test_a_sample_is_the_same_to_the_bit_in_any_company() -> None:
    how = AttentionOptions(0.3)
    together, _, _ = looked([20, 150, 64], 8, 4, (64, 64), how)
    alone, _, _ = looked([20], 8, 4, (64, 64), how)
    assert torch.equal(together[0], alone[0])


def test_large_scores_are_no_trouble() -> None:
    found, totals, wanted = looked([90], 2, 2, (32, 32), AttentionOptions(1e4))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    assert totals.isfinite().all()


def test_nan_propagates_to_output() -> None:
    key = drawn(1, 1, 16, seed=5)
    keys = drawn(1, 1, CAPACITY, 16, seed=7)
    keys[0, 0, 3, 2] = float("nan")
    at = np.array([10])
    out, _ = decode_attention(
        (key, key, key), keys, keys.clone(), at.ctypes.data, AttentionOptions(0.1)
    )
    assert out.isnan().all()


def test_what_the_kernel_cannot_do_is_left_to_torch() -> None:
    q = torch.zeros(4, 2, 64)
    assert can_use_decode_kernel((q, q, q), AttentionOptions(1.0))
    assert not can_use_decode_kernel((q, q, q), AttentionOptions(1.0, softcap=30.0))
    assert not can_use_decode_kernel((q[..., :60], q, q), AttentionOptions(1.0))
    assert not can_use_decode_kernel((q, q, q.bfloat16()), AttentionOptions(1.0))
