"""The allow-list: which names of a graph stand for which operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tinkex.engine.custom_losses import elementwise, reductions, shapes
from tinkex.engine.custom_losses.elementwise import Operation
from tinkex.engine.custom_losses.tape import Tape
from tinkex.errors import InvalidInput
from tinkex.types import CustomLossNode

_OPERATIONS: Mapping[str, Operation] = {
    **elementwise.OPERATIONS,
    **reductions.OPERATIONS,
    **shapes.OPERATIONS,
}
#: Where torch.fx says that a function is from; the names below them are the same.
_NAMESPACES = (
    "torch.nn.functional.",
    "torch._C._nn.",
    "torch._C._special.special_",
    "torch._C._linalg.linalg_",
    "torch.special.",
    "torch.linalg.",
    "torch.functional.",
    "torch.Tensor.",
    "torch.",
    "operator.",
)
_ALIASES = {
    "absolute": "abs",
    "and_": "logical_and",
    "bitwise_and": "logical_and",
    "bitwise_not": "logical_not",
    "bitwise_or": "logical_or",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "expit": "sigmoid",
    "floor_divide": "floordiv",
    "fmax": "maximum",
    "fmin": "minimum",
    "greater": "gt",
    "greater_equal": "ge",
    "inner": "dot",
    "invert": "logical_not",
    "less": "lt",
    "less_equal": "le",
    "log_sigmoid": "logsigmoid",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "or_": "logical_or",
    "ravel": "flatten",
    "remainder": "mod",
    "subtract": "sub",
    "true_divide": "div",
    "truediv": "div",
    "xor": "logical_xor",
}
#: Functions of Python's math module return plain numbers, without a gradient.
_MATH: Mapping[str, Callable[..., float]] = {
    f"math.{function.__name__}": function
    for function in (
        math.ceil,
        math.exp,
        math.expm1,
        math.fabs,
        math.floor,
        math.log,
        math.log10,
        math.log1p,
        math.log2,
        math.pow,
        math.sqrt,
        math.tanh,
    )
}


def find_operation(node: CustomLossNode) -> Operation:
    """The operation that a node calls; raises InvalidInput if it is not in the allow-list."""
    if node.op == "call_function" and node.target in _MATH:
        return _make_math(_MATH[node.target])
    name = node.target
    if node.op == "call_function" and name != "getattr":
        prefix = next((one for one in _NAMESPACES if name.startswith(one)), None)
        name = "" if prefix is None else name.removeprefix(prefix)
    operation = _OPERATIONS.get(_ALIASES.get(name, name))
    if operation is None or (name == "getattr") != (node.target == "getattr"):
        raise InvalidInput(
            f"node {node.name!r} calls {node.target!r:.80}, which is not among the operations that "
            "this server runs in uploaded losses; pass the function itself to "
            "forward_backward_custom, which computes any loss in the client"
        )
    return operation


def _make_math(function: Callable[..., float]) -> Operation:
    def apply(tape: Tape, *args: object) -> float:
        numbers = [tape.lift(arg) for arg in args]
        if any(number.data.size != 1 for number in numbers):
            raise InvalidInput(f"math.{function.__name__} takes single numbers")
        try:
            return function(*(float(number.floats.item()) for number in numbers))
        except ArithmeticError:
            return math.inf

    return apply
