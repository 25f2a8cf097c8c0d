"""Kernels of training against the formulas they stand for, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

from tinkex.nn.ops import cross_entropy as cross_entropy_module
from tinkex.nn.ops import functional, training_kernels, varlen_attention
from tinkex.nn.ops.training_kernels import QKRotary

EPS = 1e-6
ROWS, WIDTH = 67, 24
QUERIES, KEYS, HEAD = 4, 2, 16
Made = tuple[Tensor, ...]


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    if not training_kernels.can_use_training_kernels(torch.zeros(8)):
        pytest.skip("no C compiler on this machine compiles the kernels")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def pulled(run: Callable[..., Made], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What comes out, and the gradients of a weighted sum of it."""
    leaves = [one.clone().requires_grad_() for one in inputs]
    made = run(*leaves)
    slopes = [random(*one.shape, seed=at).to(one.dtype) for at, one in enumerate(made)]
    total = sum((one * slope).sum() for one, slope in zip(made, slopes, strict=True))
    assert isinstance(total, Tensor)
    return [*(one.detach() for one in made), *torch.autograd.grad(total, leaves)]


def check(
    ours: Callable[..., Made],
    formula: Callable[..., Made],
    inputs: Sequence[Tensor],
    *,
    tolerance: float = 1e-5,
) -> None:
    expected = pulled(formula, [one.double() for one in inputs])
    for found, wanted in zip(pulled(ours, inputs), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_add_rms_norm_forward_and_backward() -> None:
    check(
        lambda x, delta, weight: functional.add_rms_norm(x, delta, weight, EPS),
        lambda x, delta, weight: (x + delta, rms_norm(x + delta, (WIDTH,), weight, EPS)),
        (random(ROWS, WIDTH), random(ROWS, WIDTH, seed=1), random(WIDTH)),
    )


def test_a_sum_that_nobody_else_needs_pulls_as_well() -> None:
    check(
        lambda x, delta, weight: (functional.add_rms_norm(x, delta, weight, EPS)[1],),
        lambda x, delta, weight: (rms_norm(x + delta, (WIDTH,), weight, EPS),),
        (random(ROWS, WIDTH), random(ROWS, WIDTH, seed=1), random(WIDTH)),
    )


def test_a_norm_alone() -> None:
    check(
        lambda x, weight: (functional.rms_norm(x, weight, EPS),),
        lambda x, weight: (rms_norm(x, (WIDTH,), weight, EPS),),
        (random(ROWS, WIDTH), random(WIDTH)),
    )


def test_gates() -> None:
    both = random(ROWS, 2 * WIDTH) * 20.0
    both[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    check(
        lambda both: (functional.swiglu(both),),
        lambda both: (silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],),
        (both,),
    )


def angles() -> tuple[Tensor, Tensor]:
    at = random(ROWS, 1, HEAD // 2)
    return at.cos(), at.sin()


def by_formula(all_TNK: Tensor, *weights: Tensor) -> Made:
    cos, sin = (one.to(all_TNK.dtype) for one in angles())
    q, k, v = all_TNK.split([QUERIES, KEYS, KEYS], dim=1)
    if weights:
        pairs = zip((q, k), weights, strict=True)
        q, k = (rms_norm(one, (HEAD,), weight, EPS) for one, weight in pairs)
    turned = []
    for one in (q, k):
        first, second = one.chunk(2, -1)
        turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
    return (*turned, v)


@pytest.mark.parametrize("has_norms", [True, False])
def test_qk_norm_rotary_and_head_split(has_norms: bool) -> None:
    def ours(all_TNK: Tensor, *weights: Tensor) -> Made:
        q_weight, k_weight = weights or (None, None)
        how = QKRotary(QUERIES, KEYS, EPS, *angles(), q_weight, k_weight)
        assert how.can_use_kernel(all_TNK)
        return functional.split_qkv_rotary(all_TNK, how)

    weights = (random(HEAD), random(HEAD, seed=1)) if has_norms else ()
    check(ours, by_formula, (random(ROWS, QUERIES + 2 * KEYS, HEAD), *weights))


def attention_of(lengths: Sequence[int]) -> tuple[Callable[..., Made], Callable[..., Made]]:
    """Ours, and torch's for each document alone."""
    documents = varlen_attention.PackedDocuments(lengths)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Made:
        assert varlen_attention.can_use_varlen_kernel(q, k, v)
        return (varlen_attention.varlen_attention(q, k, v, documents, 0.3),)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Made:
        parts = zip(*(one.split(list(lengths)) for one in (q, k, v)), strict=True)
        found = []
        for part in parts:
            heads = (one.transpose(0, 1)[None] for one in part)
            out = scaled_dot_product_attention(*heads, is_causal=True, scale=0.3, enable_gqa=True)
            found.append(out[0].transpose(0, 1))
        return (torch.cat(found),)

    return ours, theirs


@given(lengths=st.lists(st.integers(1, 130), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_attention_within_documents_of_any_length(lengths: list[int]) -> None:
    ours, theirs = attention_of(lengths)
    shapes = ((QUERIES, HEAD), (KEYS, HEAD), (KEYS, HEAD))
    inputs = [random(sum(lengths), *shape, seed=at) for at, shape in enumerate(shapes)]
    check(ours, theirs, inputs, tolerance=2e-5)


def test_varlen_attention_with_strided_values() -> None:
    ours, theirs = attention_of((50, 17))
    q, k = random(67, QUERIES, HEAD), random(67, KEYS, HEAD, seed=1)

    def apart(run: Callable[..., Made]) -> Callable[..., Made]:
        return lambda q, k, wide: run(q, k, wide[:, QUERIES:])

    wide = random(67, QUERIES + KEYS, HEAD)
    check(apart(ours), apart(theirs), (q, k, wide), tolerance=2e-5)


def test_attention_is_the_same_whoever_else_is_there_and_whoever_computes_it() -> None:
    shapes = ((QUERIES, HEAD), (KEYS, HEAD), (KEYS, HEAD))
    inputs = [random(120, *shape, seed=at) for at, shape in enumerate(shapes)]
    both = attention_of((70, 50))[0](*inputs)[0]
    alone = attention_of((50,))[0](*(one[70:].contiguous() for one in inputs))[0]
    assert torch.equal(both[70:], alone)
    with threads(3):
        found = pulled(attention_of((70, 50))[0], inputs)
    with threads(1):
        again = pulled(attention_of((70, 50))[0], inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_losses_of_large_logits() -> None:
    targets, weights = torch.arange(ROWS) % 40, random(ROWS).abs()
    check(
        lambda hidden, weight: (
            cross_entropy_module.weighted_cross_entropy(hidden, weight, targets, weights),
        ),
        lambda hidden, weight: (
            (cross_entropy(hidden @ weight.t(), targets, reduction="none") * weights).sum(),
        ),
        (random(ROWS, WIDTH) * 3.0, random(40, WIDTH)),
        tolerance=1e-4,
    )


def test_what_is_not_finite_is_not_hidden() -> None:
    hidden = random(ROWS, WIDTH)
    hidden[3, 5] = float("nan")
    targets = torch.zeros(ROWS, dtype=torch.int64)
    assert cross_entropy_module.weighted_cross_entropy(
        hidden, random(40, WIDTH), targets, torch.ones(ROWS)
    ).isnan()


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    inputs = (random(2048, WIDTH), random(2048, WIDTH, seed=1), random(WIDTH))
    found = []
    for number in (1, 2, 3):
        with threads(number):
            found.append(pulled(lambda *given: functional.add_rms_norm(*given, EPS), inputs))
    for one, other in zip(found[0], found[1], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found[0], found[2], strict=True):
        assert torch.equal(one, other)
