"""Compares an operation and its gradients with a formula in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def outputs_and_grads(run: Callable[..., Outputs], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of a random weighted sum of them."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = run(*leaves)
    weights = [random(*y.shape, seed=index).to(y.dtype) for index, y in enumerate(outputs)]
    total = sum((y * weight).sum() for y, weight in zip(outputs, weights, strict=True))
    assert isinstance(total, Tensor)
    return [*(y.detach() for y in outputs), *torch.autograd.grad(total, leaves)]


def assert_matches(
    operation: Callable[..., Outputs],
    formula: Callable[..., Outputs],
    inputs: Sequence[Tensor],
    *,
    tolerance: float = 1e-5,
) -> None:
    expected = outputs_and_grads(formula, [x.double() for x in inputs])
    for actual, wanted in zip(outputs_and_grads(operation, inputs), expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


def assert_same_bits_for_any_threads(
    operation: Callable[..., Outputs], inputs: Sequence[Tensor]
) -> None:
    results = []
    for number in (1, 2, 3):
        with threads(number):
            results.append(outputs_and_grads(operation, inputs))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))
