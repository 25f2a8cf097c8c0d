"""One update of the weights: the loss of its micro-batches, summed over ranks, and one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinkex.nn.optim import NonFiniteGradient
from tinkex.pipeline.distributed import Ranks
from tinkex.pipeline.schedule import Window
from tinkex.pipeline.stage import Loss, Stage

_CLIP_EPS = 1e-6


@dataclass(slots=True, kw_only=True)
class Gathered:
    """What the micro-batches of an update came to; sums, of one rank or of all."""

    loss: float = 0.0
    weight: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def means(self) -> Mapping[str, float]:
        """Loss and metrics, divided by what was counted; NaN where nothing was."""
        weight = self.weight or math.nan
        sums = {"loss": self.loss, **self.metrics}
        return {name: value / weight for name, value in sums.items()}


def accumulate(
    stage: Stage, window: Window, ranks: Ranks, is_stopping: Callable[[], bool]
) -> Gathered | None:
    """Add up loss and gradients of this rank's micro-batches; None when asked to stop amid them."""
    gathered = Gathered()
    losses: list[Tensor] = []
    for index in window.indexes:
        if index % ranks.world_size != ranks.rank:
            continue
        # Alone, a run may leave half an update: the weights have not changed yet.
        if ranks.is_alone and is_stopping():
            return None
        batch = stage.source.batch(window.epoch, index)
        loss = stage.loss(batch)
        losses.append(_backward(loss))
        _count(gathered, loss, batch.num_tokens, batch.num_samples)
    # Reading a number waits for the device, so all are read together.
    gathered.loss = math.fsum(float(value) for value in losses)
    return gathered


def _backward(loss: Loss) -> Tensor:
    if loss.weight and loss.total.requires_grad:
        loss.total.backward()
    return loss.total.detach()


def _count(gathered: Gathered, loss: Loss, tokens: int, samples: int) -> None:
    gathered.weight += loss.weight
    gathered.tokens += tokens
    gathered.samples += samples
    for name, value in loss.metrics.items():
        gathered.metrics[name] = gathered.metrics.get(name, 0.0) + value


def share(
    gathered: Gathered, names: Sequence[str], flags: Sequence[float], ranks: Ranks
) -> tuple[Gathered, list[float]]:
    """The sums of all ranks, and of what else each has to say.

    `names` are those of the metrics: a rank without a micro-batch has none of its own.
    """
    own = [gathered.loss, gathered.weight, gathered.tokens, gathered.samples]
    own += [gathered.metrics.get(name, 0.0) for name in names]
    sums = ranks.sum_values([*own, *flags])
    metrics = dict(zip(names, sums[4:], strict=False))
    total = Gathered(loss=sums[0], weight=sums[1], tokens=sums[2], samples=sums[3], metrics=metrics)
    return total, sums[len(own) :]


class NonFiniteUpdate(NonFiniteGradient):
    """An update came to no number, so it was not taken."""

    hint = (
        "Lower --learning_rate, keep --grad_clip above 0, or look for odd rows in the data; "
        "--resume auto goes on from the last step."
    )


def check_loss(loss: float, num_done: int) -> None:
    """Refuse an update whose loss is no number, before it does any harm."""
    if not math.isfinite(loss):
        raise NonFiniteUpdate(
            f"the loss of update {num_done + 1} is {loss}, so training stops at step {num_done}"
        )


@torch.no_grad()
def scale_gradients(params: Sequence[Tensor], weight: float, clip: float) -> float:
    """Divide the gradients by a weight and clip their norm, in one pass; returns that norm."""
    gradients = [param.grad for param in params if param.grad is not None]
    if not gradients:
        return 0.0
    norms = torch.stack([gradient.norm().to("cpu") for gradient in gradients])
    norm = float(norms.norm()) / weight
    if not math.isfinite(norm):
        raise NonFiniteUpdate("the gradient has NaN or infinity, so the update was not taken")
    factor = 1.0 / weight
    if clip and norm > clip:
        factor *= clip / (norm + _CLIP_EPS)
    torch._foreach_mul_(gradients, factor)
    return norm
