from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.integration.nn.ops.gradient_checks import (
    Outputs,
    assert_matches,
    assert_same_bits_for_any_threads,
    random,
)
from tinkex.nn.ops.attention import (
    PackedDocuments,
    can_use_varlen_kernel,
    varlen_attention,
)

QUERIES, KEYS, HEAD = 4, 2, 16
SCALE = 0.3


def inputs_of(num_tokens: int) -> list[Tensor]:
    return [
        random(num_tokens, heads, HEAD, seed=i) for i, heads in enumerate((QUERIES, KEYS, KEYS))
    ]


def kernel_attention(lengths: Sequence[int]) -> Callable[..., Outputs]:
    documents = PackedDocuments(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        assert can_use_varlen_kernel(q, k, v)
        return (varlen_attention(q, k, v, documents, SCALE),)

    return attend


def torch_attention(lengths: Sequence[int]) -> Callable[..., Outputs]:
    """Each document alone."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        outs = []
        for parts in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
            heads = (x.transpose(0, 1)[None] for x in parts)
            out = scaled_dot_product_attention(*heads, is_causal=True, scale=SCALE, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return (torch.cat(outs),)

    return attend


@given(lengths=st.lists(st.integers(1, 130), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_varlen_attention_matches_torch(lengths: list[int]) -> None:
    assert_matches(
        kernel_attention(lengths),
        torch_attention(lengths),
        inputs_of(sum(lengths)),
        tolerance=2e-5,
    )


def test_varlen_attention_with_strided_values() -> None:
    def with_slice(attend: Callable[..., Outputs]) -> Callable[..., Outputs]:
        return lambda q, k, wide: attend(q, k, wide[:, QUERIES:])

    q, k, _ = inputs_of(67)
    assert_matches(
        with_slice(kernel_attention((50, 17))),
        with_slice(torch_attention((50, 17))),
        (q, k, random(67, QUERIES + KEYS, HEAD)),
        tolerance=2e-5,
    )


def test_document_is_independent_of_other_documents() -> None:
    inputs = inputs_of(120)
    (together,) = kernel_attention((70, 50))(*inputs)
    (alone,) = kernel_attention((50,))(*(x[70:].contiguous() for x in inputs))
    assert torch.equal(together[70:], alone)


def test_thread_count_does_not_change_bits() -> None:
    assert_same_bits_for_any_threads(kernel_attention((70, 50)), inputs_of(120))
