"""Operations on shapes, types and attributes of tensors, and creation of constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tinkex.engine.custom_losses.elementwise import Operation
from tinkex.engine.custom_losses.reductions import ValuesAndIndices
from tinkex.engine.custom_losses.tape import Array, Floats, Shape, Tape, Variable
from tinkex.errors import InvalidInput

_FLOAT_TYPES = frozenset({"float16", "bfloat16", "float32", "float64", "float", "double"})


class TypeName(str):
    """The name of a dtype, device, layout or memory format."""

    __slots__ = ()


def _dimensions(sizes: Sequence[object]) -> Shape:
    """Sizes that are given one by one or as one sequence."""
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = sizes[0]
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise InvalidInput(f"{tuple(sizes)!r:.80} is not a shape")
    return tuple(size for size in sizes if isinstance(size, int))


def getitem(tape: Tape, input: object, index: object) -> object:
    """A part of a tensor, or an element of a tuple such as a shape."""
    if isinstance(input, tuple | list):
        if not isinstance(index, int | slice):
            raise InvalidInput(f"a tuple has no index {index!r:.40}")
        return input[index]
    x = tape.lift(input)
    key = tuple(map(_index, index)) if isinstance(index, tuple) else _index(index)
    data = np.asarray(x.data[key])

    def scatter(g: Floats) -> Floats:
        grad = np.zeros(x.shape)
        grad[key] = g
        return grad

    return tape.record(data, (x, scatter))


def _index(index: object) -> Any:
    """One index: an integer, a slice, None, an ellipsis or a mask, which repeat no element."""
    if isinstance(index, Variable):
        if index.data.dtype != np.bool_:
            raise InvalidInput("a tensor can be an index only if it is a mask of booleans")
        return index.data
    is_integer = isinstance(index, int) and not isinstance(index, bool)
    if is_integer or index is None or index is Ellipsis:
        return index
    if isinstance(index, slice):
        bounds = (index.start, index.stop, index.step)
        if all(bound is None or isinstance(bound, int) for bound in bounds):
            return index
    raise InvalidInput(f"{index!r:.40} is not a supported index")


def reshape(tape: Tape, input: object, *shape: object) -> Variable:
    x = tape.lift(input)
    return tape.record(x.data.reshape(_dimensions(shape)), (x, lambda g: g.reshape(x.shape)))


def flatten(tape: Tape, input: object) -> Variable:
    return reshape(tape, input, -1)


def unsqueeze(tape: Tape, input: object, dim: int) -> Variable:
    x = tape.lift(input)
    return tape.record(np.expand_dims(x.data, dim), (x, lambda g: g.reshape(x.shape)))


def squeeze(tape: Tape, input: object, dim: int | None = None) -> Variable:
    x = tape.lift(input)
    is_kept = dim is not None and x.shape[dim] != 1
    data = x.data if is_kept else x.data.squeeze(dim)
    return tape.record(data, (x, lambda g: g.reshape(x.shape)))


def transpose(tape: Tape, input: object, dim0: int = 0, dim1: int = 1) -> Variable:
    x = tape.lift(input)
    return tape.record(x.data.swapaxes(dim0, dim1), (x, lambda g: g.swapaxes(dim0, dim1)))


def transpose_matrix(tape: Tape, input: object) -> Variable:
    x = tape.lift(input)
    return x if x.data.ndim < 2 else transpose(tape, x)


def flip(tape: Tape, input: object, *dims: object) -> Variable:
    x, axes = tape.lift(input), _dimensions(dims)
    return tape.record(np.flip(x.data, axes), (x, lambda g: np.flip(g, axes)))


def expand(tape: Tape, input: object, *sizes: object) -> Variable:
    x, shape = tape.lift(input), list(_dimensions(sizes))
    added = len(shape) - x.data.ndim
    shape = [x.shape[i - added] if n == -1 and i >= added else n for i, n in enumerate(shape)]
    tape.check_shape(tuple(shape))
    return tape.record(np.broadcast_to(x.data, shape), (x, lambda g: g))


def expand_as(tape: Tape, input: object, other: object) -> Variable:
    return expand(tape, input, tape.lift(other).shape)


def cat(tape: Tape, tensors: Sequence[object], dim: int = 0) -> Variable:
    parts = [tape.lift(one) for one in tensors]
    tape.check_shape((sum(one.data.size for one in parts),))
    data = np.concatenate([one.floats for one in parts], axis=dim)
    stops = np.cumsum([one.shape[dim] for one in parts]).tolist()

    def take(index: int) -> Callable[[Floats], Floats]:
        part = slice(stops[index] - parts[index].shape[dim], stops[index])
        return lambda g: np.moveaxis(np.moveaxis(g, dim, 0)[part], 0, dim)

    return tape.record(data, *((part, take(index)) for index, part in enumerate(parts)))


def stack(tape: Tape, tensors: Sequence[object], dim: int = 0) -> Variable:
    return cat(tape, [unsqueeze(tape, one, dim) for one in tensors], dim)


def detach(tape: Tape, input: object) -> Variable:
    return Variable(tape.lift(input).data)


def same(tape: Tape, input: object, *, memory_format: object = None) -> Variable:
    return tape.lift(input)


# --- types ---------------------------------------------------------------------------------------


def cast(tape: Tape, input: object, *types: object, **options: object) -> Variable:
    """A tensor of another type; all floating-point types are float64 here."""
    x = tape.lift(input)
    dtype = options.get("dtype")
    for value in types:
        if isinstance(value, TypeName) and value not in ("cpu",):
            dtype = value
    if dtype is None or dtype in _FLOAT_TYPES:
        return tape.record(x.floats, (x, lambda g: g))
    if dtype == "bool":
        return Variable(x.floats != 0.0)
    if dtype in ("int32", "int64", "long", "int"):
        return Variable(np.trunc(x.floats))
    raise InvalidInput(f"tensors of type {dtype!r:.40} are not supported")


def _cast_to(dtype: str) -> Operation:
    return lambda tape, input: cast(tape, input, dtype=dtype)


# --- constants -----------------------------------------------------------------------------------


def _filled(tape: Tape, shape: Shape, value: object, dtype: object) -> Variable:
    data: Array = np.full(tape.check_shape(shape), tape.lift(value).floats)
    return Variable(data != 0.0 if dtype == "bool" else data)


def _like(value: float | None) -> Operation:
    def apply(tape: Tape, input: object, fill_value: object = value, **options: object) -> Variable:
        return _filled(tape, tape.lift(input).shape, fill_value, options.get("dtype"))

    return apply


def _of_shape(value: float) -> Operation:
    def apply(tape: Tape, *size: object, **options: object) -> Variable:
        return _filled(tape, _dimensions(size), value, options.get("dtype"))

    return apply


def full(tape: Tape, size: object, fill_value: object, **options: object) -> Variable:
    return _filled(tape, _dimensions([size]), fill_value, options.get("dtype"))


def tensor(tape: Tape, data: object, **options: object) -> Variable:
    return cast(tape, detach(tape, data), dtype=options.get("dtype"))


def arange(
    tape: Tape, start: float, end: float | None = None, step: float = 1, **options: object
) -> Variable:
    first, last = (0, start) if end is None else (start, end)
    count = (last - first) / step
    if not math.isfinite(count):
        raise InvalidInput("arange has no end")
    tape.check_shape((max(math.ceil(count), 0),))
    return Variable(np.arange(first, last, step, dtype=np.float64))


# --- attributes ----------------------------------------------------------------------------------


def size(tape: Tape, input: object, dim: int | None = None) -> Shape | int:
    shape = tape.lift(input).shape
    return shape if dim is None else shape[dim]


def get_attribute(tape: Tape, input: object, name: object) -> object:
    """One of a few attributes; nothing else of Python is reachable."""
    if isinstance(input, ValuesAndIndices) and name in ("values", "indices"):
        return input.values if name == "values" else input.indices
    x = tape.lift(input)
    if name == "shape":
        return x.shape
    if name == "ndim":
        return x.data.ndim
    if name in ("T", "mT"):
        return transpose_matrix(tape, x)
    if name == "dtype":
        return TypeName("bool" if x.data.dtype == np.bool_ else "float64")
    if name == "device":
        return TypeName("cpu")
    raise InvalidInput(f"the attribute {name!r:.40} is not supported")


OPERATIONS: Mapping[str, Operation] = {
    "getitem": getitem,
    "getattr": get_attribute,
    "reshape": reshape,
    "view": reshape,
    "flatten": flatten,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "transpose": transpose,
    "t": transpose_matrix,
    "flip": flip,
    "expand": expand,
    "expand_as": expand_as,
    "cat": cat,
    "stack": stack,
    "detach": detach,
    "clone": same,
    "contiguous": same,
    "to": cast,
    "float": _cast_to("float64"),
    "double": _cast_to("float64"),
    "bool": _cast_to("bool"),
    "int": _cast_to("int64"),
    "long": _cast_to("int64"),
    "type_as": lambda tape, input, other: cast(
        tape, input, dtype=get_attribute(tape, other, "dtype")
    ),
    "zeros_like": _like(0.0),
    "ones_like": _like(1.0),
    "full_like": _like(None),
    "zeros": _of_shape(0.0),
    "ones": _of_shape(1.0),
    "full": full,
    "tensor": tensor,
    "arange": arange,
    "size": size,
    "dim": lambda tape, input: tape.lift(input).data.ndim,
    "numel": lambda tape, input: prod(tape.lift(input).shape),
}
