"""The training conversation: forward_backward, optim_step, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from tinkex.errors import InvalidInput
from tinkex.types.base import Message, Reply
from tinkex.types.inputs import Datum
from tinkex.types.optimizers import AdamParams, OptimParams, TypedOptimParams
from tinkex.types.tensors import TensorData

ModelID: TypeAlias = str
LossFnType: TypeAlias = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
]
LossFnOutput: TypeAlias = dict[str, TensorData]


class LoraConfig(Message):
    """Which adapter to train."""

    rank: int
    """The inner dimension of the adapter's matrices."""
    seed: int | None = None
    """Makes the adapter's first weights repeatable."""
    train_unembed: bool = True
    """Adapt the unembedding layer."""
    train_mlp: bool = True
    """Adapt the MLP layers, experts included."""
    train_attn: bool = True
    """Adapt the attention layers."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidInput(f"LoraConfig.rank is {self.rank}; expected at least 1")
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise InvalidInput(
                "LoraConfig trains nothing: train_unembed, train_mlp and train_attn are all False"
            )


@dataclass(frozen=True, slots=True)
class ForwardBackwardInput:
    """The examples of one pass and the loss to compute on them."""

    data: list[Datum]
    """The examples."""
    loss_fn: LossFnType
    """The loss, by name."""
    loss_fn_config: Mapping[str, float | str] | None = None
    """Settings of the loss, such as clip thresholds."""


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """Ask for a forward and backward pass."""

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """Ask for a forward pass only."""

    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """What a pass computed."""

    loss_fn_output_type: str
    """The kind of the output records."""
    loss_fn_outputs: list[LossFnOutput]
    """Per example, tensors by name; `logprobs` has the shape of the example's targets."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers named `name:reduction`; the reduction says how parts of a batch are merged.

    Mixture-of-experts models add how evenly tokens were spread over experts: `e_frac_with_tokens`
    (experts with any work), `e_frac_oversubscribed` (experts above their fair share) and
    `e_max_violation`, `e_min_violation` (the busiest and the idlest, relative to the fair share).
    """


class OptimStepRequest(Message):
    """Ask for one optimizer step.

    Built with `optim_params`; on the wire AdamW's numbers are called `adam_params` and those of
    every other family `optimizer_params`.
    """

    __aliases__ = ("optim_params",)

    adam_params: AdamParams | None = None
    optimizer_params: TypedOptimParams | None = None
    model_id: ModelID
    seq_id: int | None = None
    type: Literal["optim_step"] = "optim_step"

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            optim_params: OptimParams,
            model_id: ModelID,
            seq_id: int | None = None,
            type: Literal["optim_step"] = "optim_step",
        ) -> None: ...

    @classmethod
    def _prepare(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if "optim_params" not in fields:
            return fields
        params = fields.pop("optim_params")
        is_typed = hasattr(params, "type") or (isinstance(params, dict) and "type" in params)
        return {**fields, "optimizer_params" if is_typed else "adam_params": params}

    def __post_init__(self) -> None:
        if (self.adam_params is None) == (self.optimizer_params is None):
            raise InvalidInput(
                "OptimStepRequest needs either adam_params or optimizer_params, got "
                f"{self.adam_params!r} and {self.optimizer_params!r}"
            )

    @property
    def optim_params(self) -> OptimParams:
        """The numbers of the step, whatever the family."""
        params = self.optimizer_params if self.adam_params is None else self.adam_params
        assert params is not None  # __post_init__ made sure of it
        return params


class OptimStepResponse(Reply):
    """What a step reports."""

    metrics: dict[str, float] | None = None
    """Numbers by name."""


RunSessionStatus: TypeAlias = Literal["active", "finished", "lost"]


class RunStep(Reply):
    """One optimizer step, with the passes whose gradients it applied."""

    step: int
    """Its number; the first optimizer step of a run is 1."""
    cursor: int
    """Pass it as `after` to get what follows."""
    loss: float | None = None
    """Per token; None if no pass has told its loss."""
    num_tokens: int = 0
    """Tokens of its passes."""
    num_passes: int = 0
    """How many passes it had."""
    seconds: float = 0.0
    """From the start of its first pass to its end."""
    finished_at: datetime
    """When it was done."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """What its passes and the optimizer told; what is no finite number is left out."""


class RunMetricsResponse(Reply):
    """Some steps of a run, and how it stands now."""

    training_run_id: ModelID
    """The run."""
    steps: list[RunStep]
    """Oldest first."""
    num_steps: int
    """How many optimizer steps the run has done."""
    is_whole: bool = True
    """Whether it remembers the run from its beginning; the oldest steps are forgotten in time."""
    status: RunSessionStatus = "active"
    """Whether its client is there: active, finished by the client, or lost."""
    state: str | None = None
    """training, waiting, idle, finished, interrupted or failed; None if it is not known."""
    name: str | None = None
    """The name of the run, if it has one."""
    loss: float | None = None
    """The newest loss per token that was told."""
    tokens_per_second: float | None = None
    """How fast the latest passes were, with the pauses between them."""
    num_waiting: int = 0
    """Operations of the run that wait for their turn."""
    num_running: int = 0
    """Operations of the run that are being done."""
