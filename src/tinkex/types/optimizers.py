"""Optimizer configurations and the parameters of an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from tinkex.errors import InvalidInput
from tinkex.types.base import Message
from tinkex.types.open_types import OpenRecord, open_union


class OptimizerConfigBase(OpenRecord):
    """An optimizer unknown to this version; all fields are preserved."""


class AdamOptimizerConfig(Message, tag="adamw"):
    """Train with AdamW."""

    type: ClassVar[Literal["adamw"]] = "adamw"


class DimuonOptimizerConfig(Message, tag="dimuon"):
    """Train with Dimuon."""

    type: ClassVar[Literal["dimuon"]] = "dimuon"

    version: Literal[1] = 1


OptimizerConfig: TypeAlias = AdamOptimizerConfig | DimuonOptimizerConfig | OptimizerConfigBase


class AdamParams(Message):
    """The parameters of an AdamW step."""

    learning_rate: float = 0.0001
    """The learning rate."""
    beta1: float = 0.9
    """Decay of the running mean of the gradient."""
    beta2: float = 0.95
    """Decay of the running mean of its square."""
    eps: float = 1e-12
    """Added to the denominator for numerical stability."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip_norm: float = 0.0
    """Maximum global gradient norm; 0 disables clipping."""

    def __post_init__(self) -> None:
        check_range("AdamParams.learning_rate", self.learning_rate, at_least=0.0)
        check_range("AdamParams.beta1", self.beta1, at_least=0.0, below=1.0)
        check_range("AdamParams.beta2", self.beta2, at_least=0.0, below=1.0)
        check_range("AdamParams.eps", self.eps, above=0.0)
        check_range("AdamParams.weight_decay", self.weight_decay, at_least=0.0)
        check_range("AdamParams.grad_clip_norm", self.grad_clip_norm, at_least=0.0)


class OptimParamsBase(OpenRecord):
    """The parameters of an optimizer unknown to this version; all fields are preserved."""


class DimuonParams(Message, tag="dimuon"):
    """The parameters of a Dimuon step."""

    type: ClassVar[Literal["dimuon"]] = "dimuon"

    learning_rate: float
    """The learning rate."""
    grad_clip_norm: float = 0.0
    """Maximum global gradient norm; 0 or less disables clipping."""
    beta1: float = 0.9
    """Decay of the momentum."""
    damping: float | None = None
    """Smooths the preconditioner of rows and columns; None: the server's default."""
    rank_lr_correction_exponent: float | None = None
    """Multiplies the learning rate by (32 / rank) to this power; None: the server's default."""

    def __post_init__(self) -> None:
        check_range("DimuonParams.learning_rate", self.learning_rate, at_least=0.0)
        check_range("DimuonParams.grad_clip_norm", self.grad_clip_norm)
        check_range("DimuonParams.beta1", self.beta1, at_least=0.0, below=1.0)
        if self.damping is not None:
            check_range("DimuonParams.damping", self.damping, above=0.0)
        if (exponent := self.rank_lr_correction_exponent) is not None:
            check_range(
                "DimuonParams.rank_lr_correction_exponent", exponent, at_least=-8, at_most=8
            )


OptimParams: TypeAlias = AdamParams | DimuonParams | OptimParamsBase


def check_range(
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """Refuse a number that is not finite or out of bounds."""
    if not math.isfinite(value):
        raise InvalidInput(f"{name} is {value}; expected a finite number")
    if at_least is not None and value < at_least:
        raise InvalidInput(f"{name} is {value}; expected at least {at_least:g}")
    if above is not None and value <= above:
        raise InvalidInput(f"{name} is {value}; expected more than {above:g}")
    if below is not None and value >= below:
        raise InvalidInput(f"{name} is {value}; expected less than {below:g}")
    if at_most is not None and value > at_most:
        raise InvalidInput(f"{name} is {value}; expected at most {at_most:g}")


def _read_unknown_params(data: Mapping[str, object]) -> object:
    is_known = data.get("type") == DimuonParams.type
    return NotImplemented if is_known else OptimParamsBase.from_wire(data)


# Field types: type checkers see the union, msgspec a decoder that preserves unknown optimizers.
if TYPE_CHECKING:
    AnyOptimizerConfig: TypeAlias = OptimizerConfig
    TypedOptimParams: TypeAlias = DimuonParams | OptimParamsBase
else:
    AnyOptimizerConfig = open_union(
        "optimizer_config",
        AdamOptimizerConfig | DimuonOptimizerConfig,
        OptimizerConfigBase.from_wire,
    )
    TypedOptimParams = open_union("optimizer_params", DimuonParams, _read_unknown_params)
