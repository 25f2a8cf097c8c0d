"""Operations over dimensions: sums, extremes, softmax, norms, and losses built from them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tinkex.engine.custom_losses.elementwise import OPERATIONS as ELEMENTWISE
from tinkex.engine.custom_losses.elementwise import (
    Operation,
    clamp,
    div,
    maximum,
    minimum,
    mul,
    pow_,
    sub,
    where,
    xlogy,
)
from tinkex.engine.custom_losses.tape import Floats, Tape, Variable
from tinkex.errors import InvalidInput

Dims: TypeAlias = int | tuple[int, ...] | list[int] | None


class ValuesAndIndices(NamedTuple):
    """The result of an extreme along a dimension."""

    values: Variable
    indices: Variable


def _axes(variable: Variable, dim: Dims) -> tuple[int, ...]:
    """The dimensions to reduce, not negative; all of them if none is named."""
    if dim is None or dim in ((), []):
        return tuple(range(variable.data.ndim))
    wanted = (dim,) if isinstance(dim, int) else tuple(dim)
    if variable.data.ndim == 0 and set(wanted) <= {0, -1}:
        return ()
    return tuple(np.lib.array_utils.normalize_axis_tuple(wanted, variable.data.ndim))


def _keep(grad: Floats, axes: tuple[int, ...], *, is_kept: bool) -> Floats:
    """A reduced gradient with its dimensions of size 1."""
    return grad if is_kept else np.expand_dims(grad, axes)


def sum_(
    tape: Tape, input: object, dim: Dims = None, keepdim: bool = False, dtype: object = None
) -> Variable:
    x = tape.lift(input)
    axes = _axes(x, dim)
    data = np.asarray(x.floats.sum(axis=axes, keepdims=keepdim))
    return tape.record(
        data, (x, lambda g: np.broadcast_to(_keep(g, axes, is_kept=keepdim), x.shape))
    )


def mean(
    tape: Tape, input: object, dim: Dims = None, keepdim: bool = False, dtype: object = None
) -> Variable:
    x = tape.lift(input)
    count = prod(x.shape[axis] for axis in _axes(x, dim))
    return div(tape, sum_(tape, x, dim, keepdim), float(count))


def amax(tape: Tape, input: object, dim: Dims = None, keepdim: bool = False) -> Variable:
    """Ties share the gradient."""
    x = tape.lift(input)
    axes = _axes(x, dim)
    unsqueezed = np.asarray(x.floats.max(axis=axes, keepdims=True))
    is_largest = (x.floats == unsqueezed).astype(np.float64)
    share = is_largest / is_largest.sum(axis=axes, keepdims=True)
    data = unsqueezed if keepdim else unsqueezed.squeeze(axis=axes)
    return tape.record(np.asarray(data), (x, lambda g: share * _keep(g, axes, is_kept=keepdim)))


def amin(tape: Tape, input: object, dim: Dims = None, keepdim: bool = False) -> Variable:
    negative = ELEMENTWISE["neg"](tape, input)
    result: Variable = ELEMENTWISE["neg"](tape, amax(tape, negative, dim, keepdim))
    return result


def max_(
    tape: Tape, input: object, dim: object = None, keepdim: bool = False, *, other: object = None
) -> Variable | ValuesAndIndices:
    """The largest element, the largest along a dimension with its index, or the larger of two."""
    other = dim if isinstance(dim, Variable) else other
    if other is not None:
        return maximum(tape, input, other)
    if dim is None:
        return amax(tape, input)
    return _extreme(tape, tape.lift(input), dim, keepdim, np.argmax)


def min_(
    tape: Tape, input: object, dim: object = None, keepdim: bool = False, *, other: object = None
) -> Variable | ValuesAndIndices:
    other = dim if isinstance(dim, Variable) else other
    if other is not None:
        return minimum(tape, input, other)
    if dim is None:
        return amin(tape, input)
    return _extreme(tape, tape.lift(input), dim, keepdim, np.argmin)


def _extreme(tape: Tape, x: Variable, dim: object, keepdim: bool, find: Any) -> ValuesAndIndices:
    if not isinstance(dim, int):
        raise InvalidInput(f"dim is {dim!r:.40}, expected an integer")
    index = np.expand_dims(find(x.floats, axis=dim), dim)
    values = np.take_along_axis(x.floats, index, axis=dim)

    def scatter(g: Floats) -> Floats:
        grad = np.zeros(x.shape)
        np.put_along_axis(grad, index, g if keepdim else np.expand_dims(g, dim), axis=dim)
        return grad

    found = index.astype(np.float64)
    if not keepdim:
        values, found = values.squeeze(axis=dim), found.squeeze(axis=dim)
    return ValuesAndIndices(tape.record(np.asarray(values), (x, scatter)), Variable(found))


def logsumexp(tape: Tape, input: object, dim: Dims, keepdim: bool = False) -> Variable:
    x = tape.lift(input)
    axes = _axes(x, dim)
    largest = x.floats.max(axis=axes, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    unsqueezed = np.log(np.exp(x.floats - largest).sum(axis=axes, keepdims=True)) + largest
    data = unsqueezed if keepdim else unsqueezed.squeeze(axis=axes)
    return tape.record(
        np.asarray(data),
        (x, lambda g: _keep(g, axes, is_kept=keepdim) * np.exp(x.floats - unsqueezed)),
    )


def log_softmax(
    tape: Tape, input: object, dim: int, _stacklevel: int = 3, dtype: object = None
) -> Variable:
    return sub(tape, input, logsumexp(tape, input, dim, keepdim=True))


def softmax(
    tape: Tape, input: object, dim: int, _stacklevel: int = 3, dtype: object = None
) -> Variable:
    result: Variable = ELEMENTWISE["exp"](tape, log_softmax(tape, input, dim))
    return result


def cumsum(tape: Tape, input: object, dim: int, dtype: object = None) -> Variable:
    x = tape.lift(input)
    return tape.record(
        x.floats.cumsum(axis=dim),
        (x, lambda g: np.flip(np.flip(g, dim).cumsum(axis=dim), dim)),
    )


def var(
    tape: Tape,
    input: object,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Variable:
    x = tape.lift(input)
    count = prod(x.shape[axis] for axis in _axes(x, dim))
    removed = float(unbiased) if correction is None else correction
    centered = sub(tape, x, mean(tape, x, dim, keepdim=True))
    total = sum_(tape, mul(tape, centered, centered), dim, keepdim)
    return mul(tape, total, 1.0 / max(count - removed, 0.0) if count > removed else float("nan"))


def std(tape: Tape, *args: object, **kwargs: object) -> Variable:
    result: Variable = ELEMENTWISE["sqrt"](tape, var(tape, *args, **kwargs))  # type: ignore[arg-type]
    return result


def norm(
    tape: Tape,
    input: object,
    p: object = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    dtype: object = None,
    **names: object,
) -> Variable:
    """The vector norm; `ord` is another name of `p`."""
    p = names.pop("ord", p)
    if names:
        raise InvalidInput(f"norm has no option {next(iter(names))!r}")
    power = 2.0 if p in ("fro", None) else p
    if not isinstance(power, int | float) or power <= 0 or power == float("inf"):
        raise InvalidInput(f"a norm of order {p!r:.40} is not supported")
    x = tape.lift(input)
    if power == 2.0:
        total = sum_(tape, mul(tape, x, x), dim, keepdim)
        # The gradient of the root at 0 is infinite; that of the norm is 0.
        root = ELEMENTWISE["sqrt"](tape, where(tape, Variable(total.floats == 0.0), 1.0, total))
        return where(tape, Variable(total.floats == 0.0), 0.0, root)
    total = sum_(tape, pow_(tape, ELEMENTWISE["abs"](tape, x), float(power)), dim, keepdim)
    return pow_(tape, total, 1.0 / power)


def any_(tape: Tape, input: object, dim: Dims = None, keepdim: bool = False) -> Variable:
    x = tape.lift(input)
    return Variable(np.asarray((x.floats != 0.0).any(axis=_axes(x, dim), keepdims=keepdim)))


def all_(tape: Tape, input: object, dim: Dims = None, keepdim: bool = False) -> Variable:
    x = tape.lift(input)
    return Variable(np.asarray((x.floats != 0.0).all(axis=_axes(x, dim), keepdims=keepdim)))


def dot(tape: Tape, input: object, other: object) -> Variable:
    return sum_(tape, mul(tape, input, other))


# --- losses of torch.nn.functional ---------------------------------------------------------------


def _reduce(tape: Tape, value: Variable, reduction: str) -> Variable:
    if reduction == "batchmean":
        return div(tape, sum_(tape, value), float(value.shape[0] if value.shape else 1))
    if reduction not in ("none", "mean", "sum"):
        raise InvalidInput(f"reduction {reduction!r:.40} is not supported")
    return {"none": lambda: value, "mean": lambda: mean(tape, value)}.get(
        reduction, lambda: sum_(tape, value)
    )()


def mse_loss(
    tape: Tape,
    input: object,
    target: object,
    reduction: str = "mean",
) -> Variable:
    difference = sub(tape, input, target)
    return _reduce(tape, mul(tape, difference, difference), reduction)


def l1_loss(
    tape: Tape,
    input: object,
    target: object,
    reduction: str = "mean",
) -> Variable:
    return _reduce(tape, ELEMENTWISE["abs"](tape, sub(tape, input, target)), reduction)


def huber_loss(
    tape: Tape, input: object, target: object, reduction: str = "mean", delta: float = 1.0
) -> Variable:
    distance = ELEMENTWISE["abs"](tape, sub(tape, input, target))
    near = clamp(tape, distance, max=float(delta))
    # near * (distance - near / 2) is quadratic below delta and linear above.
    value = mul(tape, near, sub(tape, distance, mul(tape, near, 0.5)))
    return _reduce(tape, value, reduction)


def smooth_l1_loss(
    tape: Tape,
    input: object,
    target: object,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Variable:
    return div(tape, huber_loss(tape, input, target, reduction, beta), float(beta))


def binary_cross_entropy_with_logits(
    tape: Tape, input: object, target: object, reduction: str = "mean"
) -> Variable:
    x = tape.lift(input)
    value = sub(tape, ELEMENTWISE["softplus"](tape, x), mul(tape, x, target))
    return _reduce(tape, value, reduction)


def kl_div(
    tape: Tape,
    input: object,
    target: object,
    reduction: str = "mean",
    log_target: bool = False,
) -> Variable:
    """KL divergence of `input`, log-probabilities, from `target`."""
    if log_target:
        value = mul(tape, ELEMENTWISE["exp"](tape, target), sub(tape, target, input))
    else:
        value = sub(tape, xlogy(tape, target, target), mul(tape, target, input))
    return _reduce(tape, value, reduction)


OPERATIONS: Mapping[str, Operation] = {
    "sum": sum_,
    "mean": mean,
    "amax": amax,
    "amin": amin,
    "max": max_,
    "min": min_,
    "logsumexp": logsumexp,
    "log_softmax": log_softmax,
    "softmax": softmax,
    "cumsum": cumsum,
    "var": var,
    "std": std,
    "norm": norm,
    "vector_norm": norm,
    "any": any_,
    "all": all_,
    "dot": dot,
    "mse_loss": mse_loss,
    "l1_loss": l1_loss,
    "huber_loss": huber_loss,
    "smooth_l1_loss": smooth_l1_loss,
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "kl_div": kl_div,
}
