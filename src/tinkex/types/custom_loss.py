"""A custom loss as a traced graph, which contains data and no code."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import field

from tinkex.types.base import Message, Reply

#: 0: a scalar, 1: a value per token, 2: a row per token.
CustomLossInputRank: TypeAlias = Literal[0, 1, 2]
CustomLossNodeOp: TypeAlias = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]


class CustomLossInput(Message):
    """One input of a loss."""

    name: str
    """`logprobs`, or a key of `loss_fn_inputs`."""
    rank: CustomLossInputRank
    """Its number of dimensions in every example."""


class CustomLossNode(Message):
    """One node of the torch.fx graph of a loss."""

    op: CustomLossNodeOp
    name: str
    """Unique within the graph; referenced by later nodes."""
    target: str
    """What is called or read, such as `torch.exp`; the parameter's name; or `output`."""
    args: list[Any] = field(default_factory=list)
    """The arguments. Scalars, texts and lists are literal; everything else is an object
    with one key: ref, tuple, dict, slice, ellipsis, float (inf, -inf, nan), dtype, device, layout
    or memory_format."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The keyword arguments, encoded like `args`."""


class CustomLossGraph(Message):
    """The nodes of a loss in execution order."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(Message):
    """Request to store a loss for a session."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    """The inputs of the loss in order, `logprobs` first."""
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Reply):
    """The id of the stored loss."""

    loss_id: str
    """Identifies it in forward_backward requests of this session."""
    type: Literal["create_custom_loss"] = "create_custom_loss"
