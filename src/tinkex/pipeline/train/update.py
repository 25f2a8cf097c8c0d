"""One optimizer update: accumulation, reduction over ranks and gradient scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinkex.nn.adamw import NonFiniteGradient
from tinkex.nn.ranks import DistributedContext
from tinkex.pipeline.stage_interface import Stage, StageLoss, UpdateWindow

_CLIP_EPS = 1e-6


@dataclass(slots=True, kw_only=True)
class UpdateSums:
    """Sums over the micro-batches of an update, of one rank or of all ranks."""

    loss: float = 0.0
    weight: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def means(self) -> Mapping[str, float]:
        """Loss and metrics divided by the weight; NaN if it is 0."""
        weight = self.weight or math.nan
        sums = {"loss": self.loss, **self.metrics}
        return {name: value / weight for name, value in sums.items()}


def accumulate(
    stage: Stage, window: UpdateWindow, ranks: DistributedContext, is_stopping: Callable[[], bool]
) -> UpdateSums | None:
    """Accumulate loss and gradients of this rank's micro-batches; None if a stop is requested."""
    sums = UpdateSums()
    losses: list[Tensor] = []
    for index in window.indexes:
        if index % ranks.world_size != ranks.rank:
            continue
        # A single process can abandon an update: the weights have not changed yet.
        if ranks.is_single_process and is_stopping():
            return None
        batch = stage.source.batch(window.epoch, index)
        loss = stage.loss(batch)
        losses.append(_backward(loss))
        _add_counts(sums, loss, batch.num_tokens, batch.num_samples)
    # Reading a value synchronizes with the device, so read all values together.
    sums.loss = math.fsum(float(value) for value in losses)
    return sums


def _backward(loss: StageLoss) -> Tensor:
    if loss.weight and loss.total.requires_grad:
        loss.total.backward()
    return loss.total.detach()


def _add_counts(sums: UpdateSums, loss: StageLoss, tokens: int, samples: int) -> None:
    sums.weight += loss.weight
    sums.tokens += tokens
    sums.samples += samples
    for name, value in loss.metrics.items():
        sums.metrics[name] = sums.metrics.get(name, 0.0) + value


def sum_over_ranks(
    local_sums: UpdateSums, names: Sequence[str], flags: Sequence[float], ranks: DistributedContext
) -> tuple[UpdateSums, list[float]]:
    """Sum over all ranks; also returns the sums of `flags`.

    `names` are the metric names: a rank without a micro-batch does not know them.
    """
    values = [local_sums.loss, local_sums.weight, local_sums.tokens, local_sums.samples]
    values += [local_sums.metrics.get(name, 0.0) for name in names]
    sums = ranks.all_reduce_values([*values, *flags])
    metrics = dict(zip(names, sums[4:], strict=False))
    total = UpdateSums(
        loss=sums[0], weight=sums[1], tokens=sums[2], samples=sums[3], metrics=metrics
    )
    return total, sums[len(values) :]


class NonFiniteUpdate(NonFiniteGradient):
    """An update was rejected because its loss or gradient is not finite."""

    hint = (
        "Lower --learning_rate, keep --grad_clip above 0, or check the data for unusual rows; "
        "--resume auto continues from the last step."
    )


def check_loss(loss: float, step: int) -> None:
    """Raise NonFiniteUpdate if the loss is not finite."""
    if not math.isfinite(loss):
        raise NonFiniteUpdate(
            f"the loss of update {step + 1} is {loss}, so training stops at step {step}"
        )


@torch.no_grad()
def scale_gradients(params: Sequence[Tensor], weight: float, clip: float) -> float:
    """Divide the gradients by a weight and clip their norm in one pass; returns the norm."""
    gradients = [param.grad for param in params if param.grad is not None]
    if not gradients:
        return 0.0
    norms = torch.stack([gradient.norm().to("cpu") for gradient in gradients])
    norm = float(norms.norm()) / weight
    if not math.isfinite(norm):
        raise NonFiniteUpdate("the gradient has NaN or infinity, so the update was rejected")
    factor = 1.0 / weight
    if clip and norm > clip:
        factor *= clip / (norm + _CLIP_EPS)
    torch._foreach_mul_(gradients, factor)
    return norm
