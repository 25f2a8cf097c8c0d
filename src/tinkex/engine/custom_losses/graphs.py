"""Uploaded loss graphs: checks, limits, ids and evaluation.

The id of a loss is the loss itself, as compressed text. Nothing else is stored: a pass that names a
loss can be replayed, sent to other ranks and checked without looking anything up.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tinkex.engine.custom_losses.operations import find_operation
from tinkex.engine.custom_losses.shapes import TypeName
from tinkex.engine.custom_losses.tape import SMALL_SIZE, Floats, Tape, Variable
from tinkex.errors import InvalidInput
from tinkex.types import CustomLossGraph, CustomLossInput, CustomLossNode
from tinkex.types.base import preload_type

MAX_NODES = 256
MAX_INPUTS = 16
MAX_GRAPH_BYTES = 64 * 1024
#: Elements of all values of one example: limits memory.
MAX_EXAMPLE_ELEMENTS = 1 << 24
#: Elements of all values of a request: limits time to about two seconds.
MAX_REQUEST_ELEMENTS = 1 << 27
_MAX_DEPTH = 4
_MAX_ARGUMENTS = 64
_MAX_TEXT = 64
_ID_PREFIX = "loss1-"
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_TYPE_KINDS = frozenset({"dtype", "device", "layout", "memory_format"})
#: torch.fx records these even if they are not used.
_UNUSED_OPTIONS = frozenset({"inplace", "weight", "pos_weight", "size_average", "reduce", "out"})
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class _StoredLoss(msgspec.Struct, frozen=True, array_like=True):
    """The content of an id."""

    inputs: list[CustomLossInput]
    graph: CustomLossGraph


class ExampleLoss(NamedTuple):
    """The loss of one example."""

    value: float
    grad: Floats
    """By the log-probabilities, in their shape."""
    metrics: Mapping[str, float]


class _Step(NamedTuple):
    """One node of a checked graph."""

    name: str
    call: Callable[..., object]
    args: list[Any]
    kwargs: dict[str, Any]


class _Reference(NamedTuple):
    name: str


@dataclass(frozen=True, slots=True)
class UploadedLoss:
    """A checked graph."""

    inputs: Sequence[CustomLossInput]
    """`logprobs`, then the keys of `loss_fn_inputs` that the loss takes."""
    steps: Sequence[_Step]
    output: Any
    """The loss and the metrics, as references."""

    @property
    def input_names(self) -> list[str]:
        """The keys of `loss_fn_inputs` that the loss takes."""
        return [one.name for one in self.inputs[1:]]

    def count_elements(self, sizes: Sequence[int]) -> int:
        """At most this many elements are computed for inputs of these sizes."""
        return (len(self.steps) + 1) * max(*sizes, SMALL_SIZE // 4)

    def compute(self, logprobs: Floats, inputs: Mapping[str, Floats]) -> ExampleLoss:
        """Evaluate the loss of one example; raises InvalidInput if that fails."""
        sizes = [logprobs.size, *(inputs[name].size for name in self.input_names)]
        tape = Tape(max(sizes))
        source = tape.start(logprobs)
        values: dict[str, object] = {name: Variable(inputs[name]) for name in self.input_names}
        values[self.inputs[0].name] = source
        with np.errstate(all="ignore"):
            for step in self.steps:
                values[step.name] = _call(step, tape, values)
            loss, metrics = _resolve(self.output, values)
            value = _read_scalar("the loss", loss, must_have_grad=True)
            grad = _differentiate(tape, loss, source)
        return ExampleLoss(
            value, grad, {name: _read_scalar(name, metric) for name, metric in metrics.items()}
        )


def _call(step: _Step, tape: Tape, values: Mapping[str, object]) -> object:
    args = [_resolve(arg, values) for arg in step.args]
    kwargs = {name: _resolve(arg, values) for name, arg in step.kwargs.items()}
    try:
        return step.call(tape, *args, **kwargs)
    except InvalidInput as error:
        raise InvalidInput(f"node {step.name[1:]!r} of the custom loss: {error.message}") from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(
            f"node {step.name[1:]!r} of the custom loss fails: {reason:.200}"
        ) from None


def _differentiate(tape: Tape, loss: Variable, source: Variable) -> Floats:
    try:
        return tape.gradient(loss, source)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise InvalidInput(f"the custom loss has no gradient: {error!s:.200}") from None


def _resolve(arg: Any, values: Mapping[str, object]) -> Any:
    """An argument with values instead of references."""
    if isinstance(arg, _Reference):
        return values[arg.name]
    if isinstance(arg, list):
        return [_resolve(item, values) for item in arg]
    if isinstance(arg, tuple):
        return tuple(_resolve(item, values) for item in arg)
    if isinstance(arg, dict):
        return {name: _resolve(item, values) for name, item in arg.items()}
    if isinstance(arg, slice):
        return slice(*(_resolve(item, values) for item in (arg.start, arg.stop, arg.step)))
    return arg


def _read_scalar(label: str, value: object, *, must_have_grad: bool = False) -> float:
    if not isinstance(value, Variable) or value.data.size != 1 or (must_have_grad and value.shape):
        shape = value.shape if isinstance(value, Variable) else f"{value!r:.40}"
        raise InvalidInput(f"the custom loss returns {shape} as {label}; expected a scalar tensor")
    if must_have_grad and value.index < 0:
        raise InvalidInput("the custom loss does not depend on the log-probabilities")
    return float(value.floats.item())


# --- ids -----------------------------------------------------------------------------------------


def make_loss_id(inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> str:
    """The id of a loss, which contains it; raises InvalidInput if this server cannot run it."""
    text = msgspec.json.encode(_StoredLoss(list(inputs), graph))
    if len(text) > MAX_GRAPH_BYTES:
        raise InvalidInput(
            f"the graph of the custom loss has {len(text)} bytes; at most {MAX_GRAPH_BYTES} are "
            "allowed"
        )
    _check_loss(inputs, graph)
    return _ID_PREFIX + base64.urlsafe_b64encode(zlib.compress(text, 9)).decode()


@lru_cache(maxsize=256)
def find_loss(loss_id: str) -> UploadedLoss:
    """The loss of an id; raises InvalidInput if there is none."""
    refusal = InvalidInput(f"{loss_id!r:.40} is not the id of a custom loss of this server")
    if not loss_id.startswith(_ID_PREFIX) or len(loss_id) > 2 * MAX_GRAPH_BYTES:
        raise refusal
    try:
        packed = base64.urlsafe_b64decode(loss_id.removeprefix(_ID_PREFIX))
        # Limited: a few bytes may expand to any number.
        text = zlib.decompressobj().decompress(packed, MAX_GRAPH_BYTES)
        stored = msgspec.json.decode(text, type=preload_type(_StoredLoss))
    except (binascii.Error, UnicodeError, zlib.error, msgspec.MsgspecError, ValueError):
        raise refusal from None
    return _check_loss(stored.inputs, stored.graph)


# --- checks --------------------------------------------------------------------------------------


def _check_loss(inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> UploadedLoss:
    """Check the structure and every name; raises InvalidInput for the first problem."""
    _check_inputs(inputs)
    if not len(inputs) < len(graph.nodes) <= MAX_NODES:
        raise InvalidInput(
            f"the graph of the custom loss has {len(graph.nodes)} nodes; expected its "
            f"{len(inputs)} inputs and more, up to {MAX_NODES}"
        )
    for node, expected in zip(graph.nodes, inputs, strict=False):
        if (node.op, node.target) != ("placeholder", expected.name):
            raise InvalidInput(
                f"node {node.name!r:.80} is not the placeholder of {expected.name!r}"
            )
    names = [node.name for node in graph.nodes[: len(inputs)]]
    renamed = {name: _Reference(one.name) for name, one in zip(names, inputs, strict=True)}
    known: dict[str, _Reference] = dict(renamed)
    steps = []
    for node in graph.nodes[len(inputs) : -1]:
        if node.op not in ("call_function", "call_method"):
            raise InvalidInput(f"node {node.name!r:.80} is a {node.op}; only calls are allowed")
        if node.name in known or not 0 < len(node.name) <= _MAX_TEXT:
            raise InvalidInput(f"{node.name!r:.80} is not a unique name of a node")
        steps.append(_check_node(node, known))
        known[node.name] = _Reference(f"%{node.name}")
    return UploadedLoss(tuple(inputs), steps, _check_output(graph.nodes[-1], known))


def _check_inputs(inputs: Sequence[CustomLossInput]) -> None:
    names = [one.name for one in inputs]
    if names[:1] != ["logprobs"] or len(names) > MAX_INPUTS or len(set(names)) != len(names):
        raise InvalidInput(
            f"a custom loss takes logprobs and up to {MAX_INPUTS - 1} other inputs, each once"
        )
    for name in names:
        if not _INPUT_NAME.fullmatch(name):
            raise InvalidInput(f"{name!r:.80} is not the name of an input")
    if inputs[0].rank == 0:
        raise InvalidInput("logprobs of a custom loss have rank 1 or 2, not 0")


def _check_node(node: CustomLossNode, known: Mapping[str, _Reference]) -> _Step:
    call = find_operation(node)
    args = [_decode(node.name, arg, known, 0) for arg in _limited(node.name, node.args)]
    items = _limited(node.name, node.kwargs.items())
    kwargs = {
        name: _decode(node.name, arg, known, 0)
        for name, arg in items
        if name not in _UNUSED_OPTIONS or arg not in (None, False)
    }
    return _Step(f"%{node.name}", call, args, kwargs)


def _check_output(node: CustomLossNode, known: Mapping[str, _Reference]) -> Any:
    output = _decode("output", node.args[0], known, 0) if len(node.args) == 1 else None
    if node.op != "output" or not isinstance(output, list | tuple) or len(output) != 2:
        raise InvalidInput("the last node of a custom loss must return the loss and its metrics")
    loss, metrics = output
    if not isinstance(metrics, dict) or not isinstance(loss, _Reference):
        raise InvalidInput("a custom loss must return a tensor and a dict of metrics")
    for name, metric in metrics.items():
        if not _METRIC_NAME.fullmatch(name) or not isinstance(metric, _Reference):
            raise InvalidInput(
                f"metric {name!r:.80} of the custom loss must be a tensor named custom/<name>:sum "
                "or custom/<name>:mean"
            )
    return output


def _decode(label: str, arg: object, known: Mapping[str, _Reference], depth: int) -> Any:
    """Decode an argument; references may only name earlier nodes, so there are no cycles."""
    if depth > _MAX_DEPTH:
        raise InvalidInput(f"node {label!r} of the custom loss has arguments nested too deeply")
    if isinstance(arg, str) and len(arg) > _MAX_TEXT:
        raise InvalidInput(f"node {label!r} of the custom loss has a text of {len(arg)} characters")
    if arg is None or isinstance(arg, bool | int | float | str):
        return arg
    if isinstance(arg, list):
        return [_decode(label, item, known, depth + 1) for item in _limited(label, arg)]
    if isinstance(arg, dict) and len(arg) == 1:
        [(kind, value)] = arg.items()
        return _decode_object(label, kind, value, known, depth + 1)
    raise InvalidInput(f"node {label!r} of the custom loss has an argument {arg!r:.40}")


def _decode_object(
    label: str, kind: str, value: object, known: Mapping[str, _Reference], depth: int
) -> Any:
    if kind == "ref":
        if not isinstance(value, str) or value not in known:
            raise InvalidInput(
                f"node {label!r} of the custom loss refers to {value!r:.80}, which is not an "
                "earlier node"
            )
        return known[value]
    simple = _decode_constant(kind, value)
    if simple is not None:
        return simple
    if kind in ("tuple", "slice") and isinstance(value, list):
        items = [_decode(label, item, known, depth) for item in _limited(label, value)]
        if kind == "tuple" or len(items) == 3:
            return tuple(items) if kind == "tuple" else slice(*items)
    if kind == "dict" and isinstance(value, dict):
        entries = _limited(label, value.items())
        return {str(name): _decode(label, item, known, depth) for name, item in entries}
    raise InvalidInput(f"node {label!r} of the custom loss has an invalid {kind!r:.40}")


def _decode_constant(kind: str, value: object) -> Any:
    """A constant that JSON cannot express; None if it is not one."""
    if kind == "ellipsis":
        return ...
    if kind == "float" and isinstance(value, str):
        return _FLOATS.get(value)
    if kind in _TYPE_KINDS and isinstance(value, str):
        return TypeName(value[:_MAX_TEXT])
    return None


def _limited(label: str, items: Any) -> list[Any]:
    if len(items) > _MAX_ARGUMENTS:
        raise InvalidInput(
            f"node {label!r} of the custom loss has {len(items)} arguments; at most "
            f"{_MAX_ARGUMENTS} are allowed"
        )
    return list(items)
