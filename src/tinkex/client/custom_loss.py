"""Custom losses: computed locally on log-probabilities, sent to the server as token weights.

Cross entropy on the server is the sum of -weight * logprob. With every weight set to
-dC/dlogprob it has the gradient of any loss C, so a custom loss takes a forward pass, C and its
gradient computed locally, and a backward pass with those weights. This module does no I/O; run it
off the event loop.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from tinkex.client.loss_graph import (
    PerDatumLossFn,
    TracedLoss,
    encode_graph,
    load_torch,
    trace_loss,
)
from tinkex.errors import APIResponseValidationError, ConfigError, InvalidInput
from tinkex.installation import install_command
from tinkex.logs import get_logger
from tinkex.types import CustomLossInput, Datum, ForwardBackwardOutput, LossFnOutput, TensorData
from tinkex.types.tensors import is_torch_tensor

if TYPE_CHECKING:
    import torch
    import torch.fx

__all__ = [
    "CustomLossFnV1",
    "LossHandle",
    "PerDatumLossFn",
    "SurrogateLoss",
    "TracedLoss",
    "check_loss_fn",
    "check_loss_inputs",
    "check_loss_session",
    "compute_surrogate",
    "encode_graph",
    "forward_data",
    "run_loss_handle",
    "trace_loss",
    "with_custom_metrics",
]

logger = get_logger(__name__)

#: Loss of a batch: (data, logprobs of each datum) -> (loss, metrics by name).
CustomLossFnV1: TypeAlias = Callable[[list[Datum], list[Any]], tuple[Any, dict[str, float]]]


@dataclass(frozen=True)
class LossHandle:
    """A traced loss; pass it to forward_backward_custom() instead of a function."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    """`logprobs`, then the keys of `loss_fn_inputs` that the loss takes, in order."""
    session_id: str
    """The session it was created in; clients of other sessions cannot use it."""
    graph: torch.fx.GraphModule = field(repr=False, compare=False)
    """The traced graph, which runs instead of the original function."""
    loss_id: str | None = None
    """The loss's id on the server, or None if it runs locally."""

    @property
    def key(self) -> str:
        """A digest of the computation and its inputs, independent of the loss's name."""
        ranks = [(item.name, item.rank) for item in self.inputs]
        return hashlib.sha256(f"{ranks}\n{self.graph.code}".encode()).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...]:
        """The keys of `loss_fn_inputs` that the loss takes, in order."""
        return tuple(item.name for item in self.inputs[1:])


@dataclass(frozen=True, slots=True)
class SurrogateLoss:
    """A custom loss, expressed as data for cross entropy with the same gradient."""

    data: list[Datum]
    loss_sum: float
    metrics: dict[str, float]


def check_loss_fn(loss_fn: object) -> None:
    """Check that a loss is callable and that torch is installed, without importing torch."""
    if not isinstance(loss_fn, LossHandle) and not callable(loss_fn):
        raise InvalidInput(f"a custom loss must be a function or LossHandle, got {loss_fn!r:.80}")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"custom losses need torch: {install_command('torch')}")


def check_loss_session(handle: LossHandle, session_id: str | None) -> None:
    """Check that a loss belongs to this session: the server does not share losses."""
    if handle.session_id != session_id:
        raise InvalidInput(
            f"The loss {handle.name!r} was created in session {handle.session_id}, "
            f"but this client belongs to session {session_id}"
        )


def check_loss_inputs(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Check that every datum has all inputs of the loss, with the right rank."""
    # Log-probabilities have the shape of the targets they belong to.
    keys = ("target_tokens", *handle.input_names)
    for index, datum in enumerate(data):
        for key, expected in zip(keys, handle.inputs, strict=True):
            tensor = _get_loss_input(index, datum, key)
            if len(tensor.shape) != expected.rank:
                raise InvalidInput(
                    f"data[{index}] has {key!r} of shape {tensor.shape}; custom loss "
                    f"{handle.name!r} takes {expected.name} with rank {expected.rank}"
                )


def run_loss_handle(
    handle: LossHandle, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Sum the loss over all datums; the suffix of a metric selects sum or mean."""
    torch = load_torch()
    total = torch.zeros(())
    sums: dict[str, float] = {}
    for index, (datum, datum_logprobs) in enumerate(zip(data, logprobs, strict=True)):
        # A copy: a loss may modify it in place, and tensors share memory with the user's data.
        inputs = [
            _get_loss_input(index, datum, key).to_torch().clone() for key in handle.input_names
        ]
        loss, metrics = handle.graph(datum_logprobs, *inputs)
        if not is_torch_tensor(loss) or loss.ndim != 0:
            raise InvalidInput(
                f"custom loss {handle.name!r} returned {loss!r:.80} for data[{index}]; expected a "
                "scalar tensor"
            )
        total = total + loss
        for key, value in _read_metrics(metrics).items():
            sums[key] = sums.get(key, 0.0) + value
    return total, {
        key: value / len(data) if key.endswith(":mean") else value for key, value in sums.items()
    }


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """Return datums with only the inputs of a forward pass; missing weights become zeros."""
    import numpy as np

    forward: list[Datum] = []
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise InvalidInput(f"data[{index}] must be a Datum, got {type(datum).__name__}")
        targets = _get_loss_input(index, datum, "target_tokens")
        weights = datum.loss_fn_inputs.get("weights")
        if weights is None:
            weights = TensorData.from_numpy(np.zeros(targets.shape, dtype=np.float32))
        tensors = {"target_tokens": targets, "weights": weights}
        forward.append(replace(datum, loss_fn_inputs=tensors))
    return forward


def compute_surrogate(
    data: list[Datum], outputs: Sequence[LossFnOutput], loss_fn: CustomLossFnV1 | LossHandle
) -> SurrogateLoss:
    """Run the loss on the forward outputs and turn its gradient into weights.

    Exceptions raised by the loss are passed on unchanged.
    """
    check_loss_fn(loss_fn)
    torch = load_torch()
    logprobs = _make_leaves(data, outputs)
    with torch.enable_grad():
        result: object = (
            run_loss_handle(loss_fn, data, logprobs)
            if isinstance(loss_fn, LossHandle)
            else loss_fn(data, list(logprobs))
        )
    loss, metrics = _read_result(result)
    loss_sum = float(loss.item())
    if not math.isfinite(loss_sum):
        raise InvalidInput(f"the custom loss is {loss_sum}; it must be finite")
    for leaf in logprobs:
        leaf.grad = None  # the loss may have called backward() itself
    if loss.requires_grad:
        torch.autograd.backward(loss)
    weighted = [
        replace(datum, loss_fn_inputs=_grad_weights(index, datum, grad))
        for index, (datum, grad) in enumerate(zip(data, _collect_grads(logprobs), strict=True))
    ]
    return SurrogateLoss(weighted, loss_sum, metrics)


def with_custom_metrics(
    output: ForwardBackwardOutput, surrogate: SurrogateLoss
) -> ForwardBackwardOutput:
    """Replace the surrogate's loss by the custom loss in the metrics of the backward pass."""
    server_metrics = dict(output.metrics)
    surrogate_loss = server_metrics.pop("loss:sum", None)
    metrics = {**server_metrics, **surrogate.metrics, "loss:sum": surrogate.loss_sum}
    if surrogate_loss is not None:
        metrics["surrogate_loss:sum"] = surrogate_loss
    return replace(output, metrics=metrics)


def _get_loss_input(index: int, datum: Datum, key: str) -> TensorData:
    tensor = datum.loss_fn_inputs.get(key)
    if tensor is None:
        raise InvalidInput(
            f"data[{index}] has no {key!r} in its loss_fn_inputs; the custom loss requires it"
        )
    return tensor


def _make_leaves(data: Sequence[Datum], outputs: Sequence[LossFnOutput]) -> list[torch.Tensor]:
    if len(outputs) != len(data):
        raise APIResponseValidationError(
            message=f"The forward pass returned {len(outputs)} outputs for {len(data)} datums"
        )
    float32 = load_torch().float32
    leaves = []
    for index, (datum, output) in enumerate(zip(data, outputs, strict=True)):
        targets = _get_loss_input(index, datum, "target_tokens")
        logprobs = output.get("logprobs")
        if logprobs is None or math.prod(logprobs.shape) != math.prod(targets.shape):
            raise APIResponseValidationError(
                message=f"The forward pass returned logprobs {logprobs!r} for data[{index}], whose "
                f"target_tokens have shape {targets.shape}"
            )
        leaves.append(logprobs.to_torch().to(float32, copy=True).requires_grad_())
    return leaves


def _read_result(result: object) -> tuple[torch.Tensor, dict[str, float]]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise InvalidInput(f"the custom loss returned {result!r:.80}; expected (loss, metrics)")
    loss, metrics = result
    if not is_torch_tensor(loss) or loss.numel() != 1 or loss.is_complex():
        raise InvalidInput(
            f"the custom loss returned {loss!r:.80} as its loss; expected a real scalar tensor"
        )
    return loss, _read_metrics(metrics)


def _read_metrics(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise InvalidInput(
            f"the custom loss returned {metrics!r:.80} as its metrics; expected a dict"
        )
    return {_metric_name(key): _metric_value(key, value) for key, value in metrics.items()}


def _metric_name(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidInput(f"a metric of the custom loss is named {key!r:.80}; expected a string")
    return key


def _metric_value(key: str, value: Any) -> float:
    try:
        # float() would also parse strings.
        if not isinstance(value, str | bytes | bytearray):
            return float(value.detach() if is_torch_tensor(value) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass  # reported below
    raise InvalidInput(f"metric {key!r} of the custom loss is {value!r:.80}; expected a number")


def _collect_grads(logprobs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    num_unused = sum(leaf.grad is None for leaf in logprobs)
    if num_unused == len(logprobs):
        raise InvalidInput("the custom loss does not depend on the log-probabilities")
    if num_unused:
        logger.warning(
            "The custom loss does not depend on the log-probabilities of %d of %d datums; "
            "their gradient is zero",
            num_unused,
            len(logprobs),
        )
    return [leaf.new_zeros(leaf.shape) if leaf.grad is None else leaf.grad for leaf in logprobs]


def _grad_weights(index: int, datum: Datum, grad: torch.Tensor) -> dict[str, TensorData]:
    dense = TensorData.from_torch(grad)
    if (not_finite := dense.find_not_finite()) is not None:
        position, value = not_finite
        raise InvalidInput(
            f"the gradient of the custom loss is {value} at logprobs{position} of data[{index}]"
        )
    weights = TensorData.from_numpy(-dense.array)
    return {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": weights}
