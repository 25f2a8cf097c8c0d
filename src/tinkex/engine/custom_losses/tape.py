"""Reverse-mode differentiation on NumPy arrays, with a limit on the size of every value.

Values are float64 or bool, and sums do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tinkex.errors import InvalidInput

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Backward: TypeAlias = Callable[[Floats], Floats]
Shape: TypeAlias = tuple[int, ...]

#: Values of this size are allowed even if all inputs are smaller.
SMALL_SIZE = 4096
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """An array, and how its gradient is passed on to the variables it depends on."""

    data: Array
    parents: Sequence[tuple[Variable, Backward]] = ()
    """Only those that depend on the log-probabilities."""
    index: int = -1
    """The position in the tape; -1 if the value does not depend on the log-probabilities."""

    @property
    def shape(self) -> Shape:
        """The shape of the array."""
        return self.data.shape

    @property
    def floats(self) -> Floats:
        """The array as float64; True is 1."""
        return self.data.astype(np.float64, copy=False)


class Tape:
    """Records the operations on one example's log-probabilities."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max(max_size, SMALL_SIZE)
        self._variables: list[Variable] = []

    def start(self, logprobs: Floats) -> Variable:
        """The variable that the loss is differentiated by."""
        return self._append(logprobs, ())

    def lift(self, value: object) -> Variable:
        """A variable, or a number as one."""
        if isinstance(value, Variable):
            return value
        if isinstance(value, bool | int | float):
            return Variable(np.asarray(value, dtype=np.float64))
        raise InvalidInput(f"{value!r:.40} is not a tensor or a number")

    def record(self, data: Array, *parents: tuple[Variable, Backward]) -> Variable:
        """The result of an operation, which depends on its parents."""
        self.check_shape(data.shape)
        tracked = [(parent, backward) for parent, backward in parents if parent.index >= 0]
        return self._append(data, tracked) if tracked else Variable(data)

    def broadcast(self, *variables: Variable) -> Shape:
        """The common shape; raises InvalidInput before anything too large is allocated."""
        return self.check_shape(np.broadcast_shapes(*(one.shape for one in variables)))

    def check_shape(self, shape: Shape) -> Shape:
        """Raise InvalidInput if an array of this shape would exceed the limits."""
        if len(shape) > _MAX_DIMS or prod(shape) > self._max_size:
            raise InvalidInput(
                f"a value of shape {shape} is too large; a loss computes values of at most "
                f"{_MAX_DIMS} dimensions and {self._max_size} elements, the size of its largest "
                "input"
            )
        return shape

    def gradient(self, result: Variable, source: Variable) -> Floats:
        """The gradient of a scalar by a variable; zero if it does not depend on it."""
        grads: dict[int, Floats] = {result.index: np.ones(result.shape)}
        for variable in reversed(self._variables[: result.index + 1]):
            if variable is source:
                break
            grad = grads.pop(variable.index, None)
            if grad is None:
                continue
            for parent, backward in variable.parents:
                part = _sum_to(backward(grad), parent.shape)
                known = grads.get(parent.index)
                grads[parent.index] = part if known is None else known + part
        return grads.get(source.index, np.zeros(source.shape))

    def _append(self, data: Array, parents: Sequence[tuple[Variable, Backward]]) -> Variable:
        variable = Variable(data, parents, len(self._variables))
        self._variables.append(variable)
        return variable


def _sum_to(grad: Floats, shape: Shape) -> Floats:
    """Undo broadcasting: sum a gradient over the dimensions that were added or repeated."""
    if grad.shape == shape:
        return grad
    if grad.ndim < len(shape):
        return np.broadcast_to(grad, shape)
    added = grad.ndim - len(shape)
    total: Floats = grad.sum(axis=tuple(range(added)))
    repeated = tuple(i for i, size in enumerate(shape) if size == 1 and total.shape[i] != 1)
    total = total.sum(axis=repeated, keepdims=True)
    return np.broadcast_to(total, shape)
