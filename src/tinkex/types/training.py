"""Training requests and results: forward_backward, optim_step, run metrics, custom losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from tinkex.errors import InvalidInput
from tinkex.types.base import Message, Reply
from tinkex.types.inputs import Datum
from tinkex.types.optimizers import AdamParams, OptimParams, TypedOptimParams, check_range
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


#: Limits of `LoraConfig.target_modules`.
MAX_TARGET_MODULES = 256
MAX_MODULE_CHARS = 256


class LoraConfig(Message):
    """The configuration of a LoRA adapter.

    `alpha`, `use_rslora`, `target_modules` and `dropout` are options of tinkex servers; they are
    sent only if they are set.
    """

    rank: int
    """The rank of the A and B matrices."""
    seed: int | None = None
    """Random seed of the initial weights."""
    train_unembed: bool = True
    """Adapt the unembedding layer."""
    train_mlp: bool = True
    """Adapt the MLP layers, including experts."""
    train_attn: bool = True
    """Adapt the attention layers."""
    alpha: float | None = None
    """Numerator of the scale of the update, alpha / rank; None means 32."""
    use_rslora: bool | None = None
    """Rank-stabilized LoRA: scale by alpha / sqrt(rank)."""
    target_modules: list[str] | None = None
    """Names of the modules to adapt, such as `q_proj`, out of the enabled layers; None means all.
    As in PEFT, a name selects the modules whose path ends with it."""
    dropout: float | None = None
    """LoRA dropout; only 0 is supported."""

    def __post_init__(self) -> None:
        self._check_options()
        if self.rank < 1:
            raise InvalidInput(f"LoraConfig.rank is {self.rank}; expected at least 1")
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise InvalidInput(
                "LoraConfig trains nothing: train_unembed, train_mlp and train_attn are all False"
            )

    def _check_options(self) -> None:
        if self.alpha is not None:
            check_range("LoraConfig.alpha", self.alpha, above=0.0)
        if self.dropout:
            raise InvalidInput(
                f"LoraConfig.dropout is {self.dropout}; LoRA dropout is not supported, because the "
                "sampled and the trained model must agree: leave it out or set it to 0, and use "
                "weight decay or fewer epochs against overfitting"
            )
        if self.target_modules is not None:
            _check_target_modules(self.target_modules)


def _check_target_modules(names: list[str]) -> None:
    if not 1 <= len(names) <= MAX_TARGET_MODULES:
        raise InvalidInput(
            f"LoraConfig.target_modules has {len(names)} names; expected 1 to {MAX_TARGET_MODULES}"
        )
    for name in names:
        if not 1 <= len(name) <= MAX_MODULE_CHARS:
            raise InvalidInput(
                f"LoraConfig.target_modules has {name!r:.80}; expected a module's name of at most "
                f"{MAX_MODULE_CHARS} characters, such as 'q_proj'"
            )


@dataclass(frozen=True, slots=True)
class ForwardBackwardInput:
    """The examples and the loss of a pass."""

    data: list[Datum]
    """The examples."""
    loss_fn: LossFnType
    """The loss, by name."""
    loss_fn_config: Mapping[str, float | str] | None = None
    """Settings of the loss, such as clip thresholds."""


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """Request a forward and backward pass."""

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """Request a forward pass."""

    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """The result of a pass."""

    loss_fn_output_type: str
    """The type of the output records."""
    loss_fn_outputs: list[LossFnOutput]
    """Per example, tensors by name; `logprobs` has the shape of the example's targets."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics named `name:reduction`; the reduction defines how chunks of a batch are merged.

    Mixture-of-experts models add metrics of the load balance: `e_frac_with_tokens` (experts with
    tokens), `e_frac_oversubscribed` (experts above the mean load) and `e_max_violation`,
    `e_min_violation` (highest and lowest load relative to the mean).
    """


class OptimStepRequest(Message):
    """Request an optimizer step.

    The constructor takes `optim_params`; on the wire the parameters of AdamW are `adam_params`,
    those of other optimizers `optimizer_params`.
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
    def _prepare(cls, fields: dict[str, object]) -> dict[str, object]:
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
        """The parameters of the step."""
        params = self.optimizer_params if self.adam_params is None else self.adam_params
        assert params is not None  # checked by __post_init__
        return params


class OptimStepResponse(Reply):
    """The result of an optimizer step."""

    metrics: dict[str, float] | None = None
    """Metrics by name."""


RunSessionStatus: TypeAlias = Literal["active", "finished", "lost"]


class RunStep(Reply):
    """One optimizer step, with the passes whose gradients it applied."""

    step: int
    """Its number, from 1."""
    cursor: int
    """Pass it as `after` to get later steps."""
    loss: float | None = None
    """Per token; None if no pass has reported a loss."""
    num_tokens: int = 0
    """Tokens of its passes."""
    num_passes: int = 0
    """Number of passes."""
    seconds: float = 0.0
    """From the start of its first pass to its end."""
    finished_at: datetime
    """When it finished."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Metrics of its passes and the optimizer; NaN and infinity are omitted."""


class RunMetricsResponse(Reply):
    """Steps of a run and its current state."""

    training_run_id: ModelID
    """The run."""
    steps: list[RunStep]
    """Oldest first."""
    num_steps: int
    """Number of completed optimizer steps."""
    is_whole: bool = True
    """Whether all steps of the run are stored; the oldest expire."""
    status: RunSessionStatus = "active"
    """The state of its session: active, finished by the client, or lost."""
    state: str | None = None
    """training, waiting, idle, finished, interrupted or failed; None if unknown."""
    name: str | None = None
    """The name of the run."""
    loss: float | None = None
    """The newest reported loss per token."""
    tokens_per_second: float | None = None
    """Throughput of the latest passes, including pauses."""
    num_waiting: int = 0
    """Queued operations of the run."""
    num_running: int = 0
    """Running operations of the run."""


# --- custom losses: a traced graph, which contains data and no code ----------------------------
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
    args: list[Any] = msgspec.field(default_factory=list)
    """The arguments. Scalars, texts and lists are literal; everything else is an object
    with one key: ref, tuple, dict, slice, ellipsis, float (inf, -inf, nan), dtype, device, layout
    or memory_format."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
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
