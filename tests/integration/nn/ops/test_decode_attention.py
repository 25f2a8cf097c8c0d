from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tinkex.nn.forward_context import AttentionOptions
from tinkex.nn.ops.attention import can_use_decode_kernel, decode_attention

CAPACITY = 200


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(
    lengths: list[int],
    heads: int,
    key_heads: int,
    widths: tuple[int, int],
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and LSE of the kernel, and the output of torch in float64."""
    num, (key_width, value_width) = len(lengths), widths
    # Rows first in memory, as in the output of the merged QKV projection.
    new = random(num, heads + key_heads, key_width, seed=1).transpose(0, 1)
    q, k = new[:heads], new[heads:]
    v = random(num, key_heads, value_width, seed=2).transpose(0, 1)
    keys = random(num, key_heads, CAPACITY, key_width, seed=3)
    values = random(num, key_heads, CAPACITY, value_width, seed=4)
    lengths_array = np.array(lengths)
    out, lse = decode_attention((q, k, v), keys, values, lengths_array.ctypes.data, options)
    expected = []
    for row, length in enumerate(lengths):
        assert torch.equal(keys[row, :, length], k[:, row]), "the new key is appended"
        assert torch.equal(values[row, :, length], v[:, row])
        first = max(0, length + 1 - options.window) if options.window else 0
        cached = keys[row, :, first : length + 1], values[row, :, first : length + 1]
        expected.append(
            scaled_dot_product_attention(
                q[:, row : row + 1].double().unsqueeze(0),
                *(x.double().unsqueeze(0) for x in cached),
                scale=options.scaling,
                enable_gqa=True,
            )[0, :, 0]
        )
    return out, lse, torch.stack(expected)


@pytest.mark.parametrize("lengths", [[0], [5, 0, 63, 64], [127, 128, 199, 1], [30] * 16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (9, 3)])
@pytest.mark.parametrize("window", [None, 1, 50])
def test_decode_attention_matches_torch(
    lengths: list[int], heads: tuple[int, int], window: int | None
) -> None:
    actual, _, expected = run(lengths, *heads, (64, 64), AttentionOptions(0.3, window))
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_keys_and_values_of_different_widths() -> None:
    actual, _, expected = run([70, 3], 6, 2, (24, 128), AttentionOptions(0.125))
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_lse_matches_softmax_denominator() -> None:
    scale = 0.2
    key, query = random(1, 1, 16, seed=5), random(1, 1, 16, seed=6)
    keys = random(1, 1, CAPACITY, 16, seed=7)
    lengths_array = np.array([99])
    _, lse = decode_attention(
        (query, key, key), keys, keys.clone(), lengths_array.ctypes.data, AttentionOptions(scale)
    )
    scores = keys[0, 0, :100].double() @ query[0, 0].double() * scale
    assert lse.item() == pytest.approx(scores.logsumexp(0).item(), abs=1e-5)


def test_sequence_is_independent_of_the_batch() -> None:
    options = AttentionOptions(0.3)
    together, _, _ = run([20, 150, 64], 8, 4, (64, 64), options)
    alone, _, _ = run([20], 8, 4, (64, 64), options)
    assert torch.equal(together[0], alone[0])


def test_large_scores_do_not_overflow() -> None:
    actual, lse, expected = run([90], 2, 2, (32, 32), AttentionOptions(1e4))
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
    assert lse.isfinite().all()


def test_nan_propagates_to_output() -> None:
    key = random(1, 1, 16, seed=5)
    keys = random(1, 1, CAPACITY, 16, seed=7)
    keys[0, 0, 3, 2] = float("nan")
    lengths_array = np.array([10])
    out, _ = decode_attention(
        (key, key, key), keys, keys.clone(), lengths_array.ctypes.data, AttentionOptions(0.1)
    )
    assert out.isnan().all()


def test_unsupported_inputs_are_detected() -> None:
    q = torch.zeros(4, 2, 64)
    assert can_use_decode_kernel((q, q, q), AttentionOptions(1.0))
    assert not can_use_decode_kernel((q, q, q), AttentionOptions(1.0, softcap=30.0))
    assert not can_use_decode_kernel((q[..., :60], q, q), AttentionOptions(1.0))
    assert not can_use_decode_kernel((q, q, q.bfloat16()), AttentionOptions(1.0))
