"""A user's own loss, as a traced graph that holds data and no code."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import field

from tinkex.types.base import Message, Reply

#: 0 is a number, 1 one per token, 2 a row per token.
CustomLossInputRank: TypeAlias = Literal[0, 1, 2]
CustomLossNodeOp: TypeAlias = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]


class CustomLossInput(Message):
    """One input of a loss."""

    name: str
    """`logprobs`, or a key of `loss_fn_inputs`."""
    rank: CustomLossInputRank
    """How many dimensions it has in every example."""


class CustomLossNode(Message):
    """One step of a loss, as torch.fx records it."""

    op: CustomLossNodeOp
    name: str
    """Unique within the graph; later steps refer to it."""
    target: str
    """What is called or read, such as `torch.exp`; the parameter's name; or `output`."""
    args: list[Any] = field(default_factory=list)
    """The arguments. Scalars, texts and lists stand for themselves; everything else is an object
    with one key: ref, tuple, dict, slice, ellipsis, float (inf, -inf, nan), dtype, device, layout
    or memory_format."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The keyword arguments, written like `args`."""


class CustomLossGraph(Message):
    """The steps of a loss in the order they run."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(Message):
    """Ask the server to keep a loss for a session."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    """What the loss takes, in order, `logprobs` first."""
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Reply):
    """The loss is kept."""

    loss_id: str
    """Names it in this session's forward_backward requests."""
    type: Literal["create_custom_loss"] = "create_custom_loss"
