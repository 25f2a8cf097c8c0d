"""Operations on single elements: arithmetic, comparisons, selection.

Every operation takes the tape and then the arguments of the torch function of the same name.
Gradients at edges, such as ties of a maximum, are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from tinkex.engine.custom_losses.tape import Array, Floats, Tape, Variable
from tinkex.errors import InvalidInput

Operation: TypeAlias = Callable[..., Any]
_Unary: TypeAlias = tuple[Callable[[Floats], Floats], Callable[[Floats, Floats], Floats | float]]
#: Larger integers are not exact as floats.
_MAX_INTEGER = 2**53


def _sigmoid(x: Floats) -> Floats:
    return np.exp(-np.logaddexp(0.0, -x))


#: The function, and its derivative given the argument and the result.
_UNARY: Mapping[str, _Unary] = {
    "neg": (np.negative, lambda x, y: -1.0),
    "abs": (np.abs, lambda x, y: np.sign(x)),
    "exp": (np.exp, lambda x, y: y),
    "exp2": (np.exp2, lambda x, y: y * math.log(2.0)),
    "expm1": (np.expm1, lambda x, y: y + 1.0),
    "log": (np.log, lambda x, y: 1.0 / x),
    "log2": (np.log2, lambda x, y: 1.0 / (x * math.log(2.0))),
    "log10": (np.log10, lambda x, y: 1.0 / (x * math.log(10.0))),
    "log1p": (np.log1p, lambda x, y: 1.0 / (x + 1.0)),
    "sqrt": (np.sqrt, lambda x, y: 0.5 / y),
    "rsqrt": (lambda x: 1.0 / np.sqrt(x), lambda x, y: -0.5 * y / x),
    "square": (np.square, lambda x, y: 2.0 * x),
    "reciprocal": (lambda x: 1.0 / x, lambda x, y: -y * y),
    "sigmoid": (_sigmoid, lambda x, y: y * (1.0 - y)),
    "tanh": (np.tanh, lambda x, y: 1.0 - y * y),
    "sin": (np.sin, lambda x, y: np.cos(x)),
    "cos": (np.cos, lambda x, y: -np.sin(x)),
    "relu": (lambda x: np.where(x > 0.0, x, 0.0), lambda x, y: (x > 0.0).astype(np.float64)),
    "logsigmoid": (lambda x: -np.logaddexp(0.0, -x), lambda x, y: _sigmoid(-x)),
    "sign": (np.sign, lambda x, y: 0.0),
    "floor": (np.floor, lambda x, y: 0.0),
    "ceil": (np.ceil, lambda x, y: 0.0),
    "round": (np.round, lambda x, y: 0.0),
    "trunc": (np.trunc, lambda x, y: 0.0),
}
_TESTS: Mapping[str, Callable[[Floats], Array]] = {
    "isnan": np.isnan,
    "isinf": np.isinf,
    "isfinite": np.isfinite,
    "logical_not": lambda x: x == 0.0,
}
_COMPARISONS: Mapping[str, Callable[[Floats, Floats], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
#: Arithmetic on two numbers that are not tensors, such as dimensions.
_NUMBERS: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    # Powers of large integers would take forever.
    "pow": math.pow,
}


def _make_unary(name: str) -> Operation:
    function, derivative = _UNARY[name]

    def apply(tape: Tape, input: object) -> Variable:
        variable = tape.lift(input)
        x = variable.floats
        y = function(x)
        return tape.record(y, (variable, lambda g: g * derivative(x, y)))

    return apply


def _make_test(name: str) -> Operation:
    return lambda tape, input: tape.record(np.asarray(_TESTS[name](tape.lift(input).floats)))


def _make_comparison(name: str) -> Operation:
    def apply(tape: Tape, input: object, other: object) -> Variable:
        x, y = tape.lift(input), tape.lift(other)
        tape.broadcast(x, y)
        return tape.record(np.asarray(_COMPARISONS[name](x.floats, y.floats)))

    return apply


def _make_number(name: str, tensors: Operation) -> Operation:
    """The operation on tensors, or on two plain numbers, which stay plain."""

    def apply(tape: Tape, input: object, other: object, **options: object) -> object:
        is_plain = isinstance(input, int | float) and isinstance(other, int | float)
        if not is_plain or options:
            return tensors(tape, input, other, **options)
        assert isinstance(input, int | float)
        assert isinstance(other, int | float)
        try:
            result = _NUMBERS[name](input, other)
        except ArithmeticError as error:
            raise InvalidInput(f"{name}({input}, {other}): {error}") from None
        if isinstance(input, int) and isinstance(other, int) and result == result // 1:
            result = int(result) if name != "div" else result
        if abs(result) > _MAX_INTEGER and isinstance(result, int):
            raise InvalidInput(f"{name}({input}, {other}) is too large")
        return result

    return apply


def add(tape: Tape, input: object, other: object, *, alpha: float = 1) -> Variable:
    x, y = tape.lift(input), tape.lift(other)
    tape.broadcast(x, y)
    factor = float(alpha)
    return tape.record(
        np.asarray(x.floats + factor * y.floats), (x, lambda g: g), (y, lambda g: g * factor)
    )


def sub(tape: Tape, input: object, other: object, *, alpha: float = 1) -> Variable:
    return add(tape, input, other, alpha=-float(alpha))


def mul(tape: Tape, input: object, other: object) -> Variable:
    x, y = tape.lift(input), tape.lift(other)
    tape.broadcast(x, y)
    return tape.record(
        np.asarray(x.floats * y.floats), (x, lambda g: g * y.floats), (y, lambda g: g * x.floats)
    )


def div(tape: Tape, input: object, other: object) -> Variable:
    x, y = tape.lift(input), tape.lift(other)
    tape.broadcast(x, y)
    result = np.asarray(x.floats / y.floats)
    return tape.record(result, (x, lambda g: g / y.floats), (y, lambda g: -g * result / y.floats))


def pow_(tape: Tape, input: object, exponent: object) -> Variable:
    x, y = tape.lift(input), tape.lift(exponent)
    tape.broadcast(x, y)
    base, power = x.floats, y.floats
    result = np.asarray(np.power(base, power))

    def by_base(g: Floats) -> Floats:
        return np.where(power == 0.0, 0.0, g * power * np.power(base, power - 1.0))

    def by_power(g: Floats) -> Floats:
        return np.where((base == 0.0) & (power >= 0.0), 0.0, g * result * np.log(base))

    return tape.record(result, (x, by_base), (y, by_power))


def maximum(tape: Tape, input: object, other: object) -> Variable:
    x, y = tape.lift(input), tape.lift(other)
    tape.broadcast(x, y)
    share = np.where(x.floats == y.floats, 0.5, (x.floats > y.floats).astype(np.float64))
    return tape.record(
        np.asarray(np.maximum(x.floats, y.floats)),
        (x, lambda g: g * share),
        (y, lambda g: g * (1.0 - share)),
    )


def minimum(tape: Tape, input: object, other: object) -> Variable:
    result: Variable = neg(tape, maximum(tape, neg(tape, input), neg(tape, other)))
    return result


def logaddexp(tape: Tape, input: object, other: object) -> Variable:
    x, y = tape.lift(input), tape.lift(other)
    tape.broadcast(x, y)
    result = np.asarray(np.logaddexp(x.floats, y.floats))
    return tape.record(
        result,
        (x, lambda g: g * np.exp(x.floats - result)),
        (y, lambda g: g * np.exp(y.floats - result)),
    )


def where(tape: Tape, condition: object, input: object, other: object) -> Variable:
    c, x, y = (tape.lift(value) for value in (condition, input, other))
    tape.broadcast(c, x, y)
    chosen = c.floats != 0.0
    return tape.record(
        np.where(chosen, x.floats, y.floats),
        (x, lambda g: np.where(chosen, g, 0.0)),
        (y, lambda g: np.where(chosen, 0.0, g)),
    )


def masked_fill(tape: Tape, input: object, mask: object, value: object) -> Variable:
    return where(tape, mask, value, input)


def clamp(tape: Tape, input: object, min: object = None, max: object = None) -> Variable:
    """The gradient is 1 within the bounds, which have none of their own unless they are reached."""
    result = tape.lift(input)
    if min is not None:
        result = where(tape, _compare(tape, "lt", result, min), min, result)
    if max is not None:
        result = where(tape, _compare(tape, "gt", result, max), max, result)
    return result


def softplus(tape: Tape, input: object, beta: float = 1, threshold: float = 20) -> Variable:
    scaled = mul(tape, input, float(beta))
    result = neg(tape, OPERATIONS["logsigmoid"](tape, neg(tape, scaled)))
    return div(tape, result, float(beta))


def silu(tape: Tape, input: object) -> Variable:
    return mul(tape, input, OPERATIONS["sigmoid"](tape, input))


def xlogy(tape: Tape, input: object, other: object) -> Variable:
    x = tape.lift(input)
    product = mul(tape, x, OPERATIONS["log"](tape, other))
    return where(tape, _compare(tape, "eq", x, 0.0), 0.0, product)


def nan_to_num(
    tape: Tape, input: object, nan: float | None = None, posinf: Any = None, neginf: Any = None
) -> Variable:
    x = tape.lift(input)
    largest = float(np.finfo(np.float32).max)
    data = np.nan_to_num(
        x.floats,
        nan=0.0 if nan is None else nan,
        posinf=largest if posinf is None else posinf,
        neginf=-largest if neginf is None else neginf,
    )
    finite = np.isfinite(x.floats)
    return tape.record(data, (x, lambda g: np.where(finite, g, 0.0)))


def _compare(tape: Tape, name: str, x: object, y: object) -> Variable:
    result: Variable = OPERATIONS[name](tape, x, y)
    return result


neg = _make_unary("neg")
OPERATIONS: Mapping[str, Operation] = {
    **{name: _make_unary(name) for name in _UNARY},
    **{name: _make_test(name) for name in _TESTS},
    **{name: _make_comparison(name) for name in _COMPARISONS},
    "add": _make_number("add", add),
    "sub": _make_number("sub", sub),
    "mul": _make_number("mul", mul),
    "div": _make_number("div", div),
    "pow": _make_number("pow", pow_),
    "floordiv": _make_number(
        "floordiv", lambda tape, x, y: OPERATIONS["floor"](tape, div(tape, x, y))
    ),
    "mod": _make_number(
        "mod",
        lambda tape, x, y: sub(tape, x, mul(tape, OPERATIONS["floor"](tape, div(tape, x, y)), y)),
    ),
    "maximum": maximum,
    "minimum": minimum,
    "logaddexp": logaddexp,
    "where": where,
    "masked_fill": masked_fill,
    "clamp": clamp,
    "clamp_min": lambda tape, input, min: clamp(tape, input, min=min),
    "clamp_max": lambda tape, input, max: clamp(tape, input, max=max),
    "softplus": softplus,
    "silu": silu,
    "xlogy": xlogy,
    "nan_to_num": nan_to_num,
}
