"""Computes the micro-batches of a rank's shards, for passes of many adapters on one hosted model.

Autograd covers only the transformer layers: the LM head and the losses compute their gradients on
flat arrays, and `backward` starts from the gradient of the hidden states.

Shape letters: T token positions, P pairs of (token position, target), D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.adapters import TrainableAdapter
from tinkex.engine.examples import TrainingExample
from tinkex.engine.gradient_shards import ShardBatch, TreeSum
from tinkex.engine.losses import LossValue, compute_loss, is_linear
from tinkex.engine.micro_batches import ExampleRef, PackedBatch, pack_examples
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.lora_training import LoraSegment, SegmentedLora
from tinkex.nn.packed_attention import PackedAttention
from tinkex.nn.target_logprobs import TargetLogprobs
from tinkex.types import ForwardBackwardInput

if TYPE_CHECKING:
    from tinkex.nn.hosted_model import HostedModel

Floats: TypeAlias = npt.NDArray[np.floating]
#: Logits that may be kept from the forward to the backward half of a micro-batch.
MAX_LOGITS_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PassWork:
    """A validated pass of one adapter."""

    adapter_id: str
    adapter: TrainableAdapter
    request: ForwardBackwardInput
    examples: Mapping[int, TrainingExample]
    """The examples by index: all of them, or those of a rank's shards."""
    is_forward_only: bool


@dataclass(slots=True)
class PassResult:
    """The result of a rank's micro-batches of one pass."""

    logprobs: dict[int, Floats] = field(default_factory=dict)
    """By example index."""
    losses: dict[int, LossValue] = field(default_factory=dict)
    """By the number of the micro-batch."""
    gradient: Tensor | None = None
    """None if the pass is not trained, or has no example in the rank's shards."""


@dataclass(slots=True)
class _PassAccumulator:
    """Intermediate results of a pass."""

    work: PassWork
    result: PassResult = field(default_factory=PassResult)
    gradient: Tensor | None = None
    """The gradient of the current shard."""
    tree: TreeSum[Tensor] = field(default_factory=lambda: TreeSum(Tensor.add_))

    def ensure_gradient(self) -> None:
        if self.gradient is None and not self.work.is_forward_only:
            self.gradient = torch.zeros_like(self.work.adapter.state.weights)

    def end_shard(self) -> None:
        gradient, self.gradient = self.gradient, None
        self.tree.append(gradient)


class _BatchPart(NamedTuple):
    """The examples of one pass in a micro-batch."""

    accumulator: _PassAccumulator
    example_indices: list[int]

    @property
    def examples(self) -> list[TrainingExample]:
        return [self.accumulator.work.examples[index] for index in self.example_indices]


class _PartLoss(NamedTuple):
    """The loss of one pass in a micro-batch."""

    part: _BatchPart
    loss: LossValue
    logprobs: list[Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The shards and micro-batches of one rank in an attempt to run passes."""

    shards: range
    batches: Mapping[int, ShardBatch]
    """By their number among the micro-batches of all ranks, in the order of the shards."""
    max_tokens_at_once: int
    """Larger micro-batches store only the inputs of layers, and recompute the rest."""


class ShardRun:
    """Runs the micro-batches of one rank; the model is looked up again for every one."""

    def __init__(
        self,
        passes: Sequence[PassWork],
        plan: RankPlan,
        get_hosted_model: Callable[[], HostedModel],
    ) -> None:
        self._get_hosted_model = get_hosted_model
        self._plan = plan
        self.passes = passes
        self._accumulators = [_PassAccumulator(work) for work in passes]
        self._remaining = iter(plan.batches.items())
        self._ended_shards = 0

    def step(self) -> None:
        """Compute the next micro-batch; without one, take part in those of other ranks."""
        number, batch = next(self._remaining, (0, None))
        if batch is None:
            self._take_part()
            return
        self._end_shards_before(batch.shard)
        parts = _group_by_pass(self._accumulators, batch.refs)
        for part in parts:
            part.accumulator.ensure_gradient()
        # Recomputing activations is worthwhile only for an example that exceeds the limit.
        is_long = batch.num_tokens > self._plan.max_tokens_at_once
        for part, loss, logprobs in self._run_batch(parts, checkpoint_activations=is_long):
            result = part.accumulator.result
            result.logprobs |= dict(zip(part.example_indices, logprobs, strict=True))
            result.losses[number] = loss

    def finish(self) -> list[PassResult]:
        """Return the result of each pass, after all micro-batches."""
        self._end_shards_before(self._plan.shards.stop)
        for accumulator in self._accumulators:
            accumulator.result.gradient = accumulator.tree.total
        return [accumulator.result for accumulator in self._accumulators]

    def _end_shards_before(self, shard: int) -> None:
        while self._plan.shards.start + self._ended_shards < shard:
            for accumulator in self._accumulators:
                accumulator.end_shard()
            self._ended_shards += 1

    def _take_part(self) -> None:
        """Run a pass of one row without a result, if every pass is collective."""
        hosted_model = self._get_hosted_model()
        if not hosted_model.is_collective:
            return
        work = self.passes[0]
        adapter, grad_views = work.adapter, None
        if not work.is_forward_only:
            grad_views = adapter.layout.views(torch.zeros_like(adapter.state.weights))
        segment = LoraSegment(0, 1, adapter.scale, adapter.weight_views, grad_views)
        zero = torch.zeros(1, dtype=torch.long, device=hosted_model.device)
        with torch.set_grad_enabled(grad_views is not None):
            hidden_TD = hosted_model.hidden_states(
                zero,
                zero,
                ForwardContext(SegmentedLora([segment]), PackedAttention([1])),
                is_announced=True,
            )
        if hidden_TD.requires_grad:
            hidden_TD.backward(torch.zeros_like(hidden_TD))

    def _run_batch(
        self, parts: Sequence[_BatchPart], *, checkpoint_activations: bool
    ) -> list[_PartLoss]:
        hosted_model = self._get_hosted_model()
        device = hosted_model.device
        packed = pack_examples([example for part in parts for example in part.examples])
        segments = _lora_segments(parts)
        is_trained = any(part.accumulator.gradient is not None for part in parts)
        with torch.set_grad_enabled(is_trained):
            hidden_TD = hosted_model.hidden_states(
                torch.from_numpy(packed.tokens_T).to(device),
                torch.from_numpy(packed.positions_T).to(device),
                ForwardContext(segments, PackedAttention(packed.lengths)),
                checkpoint_activations=checkpoint_activations,
                is_announced=True,
            )
        scorer = TargetLogprobs(
            hosted_model.lm_head,
            hidden_TD.detach(),
            segments,
            packed.rows_P,
            packed.targets_P,
            max_logits_bytes=MAX_LOGITS_BYTES,
            save_logprobs=is_trained,
        )
        losses, dhidden_TD = _score_batch(scorer, parts, packed)
        if hidden_TD.requires_grad:
            hidden_TD.backward(dhidden_TD)
        return losses


def _group_by_pass(
    accumulators: Sequence[_PassAccumulator], refs: Sequence[ExampleRef]
) -> list[_BatchPart]:
    """The passes of a micro-batch with their examples, in the order of the packed tokens."""
    indices: dict[int, list[int]] = {}
    for pass_index, example_index in refs:
        indices.setdefault(pass_index, []).append(example_index)
    return [_BatchPart(accumulators[p], examples) for p, examples in indices.items()]


def _lora_segments(parts: Sequence[_BatchPart]) -> SegmentedLora:
    segments, start = [], 0
    for part in parts:
        adapter, gradient = part.accumulator.work.adapter, part.accumulator.gradient
        stop = start + sum(len(example.tokens) for example in part.examples)
        grad_views = None if gradient is None else adapter.layout.views(gradient)
        segments.append(LoraSegment(start, stop, adapter.scale, adapter.weight_views, grad_views))
        start = stop
    return SegmentedLora(segments)


def _score_batch(
    scorer: TargetLogprobs, parts: Sequence[_BatchPart], packed: PackedBatch
) -> tuple[list[_PartLoss], Tensor | None]:
    """Return log-probabilities and losses, and the gradient of the hidden states, if any."""
    is_trained = any(part.accumulator.gradient is not None for part in parts)
    loss_names = {part.accumulator.work.request.loss_fn for part in parts}
    if is_trained and all(map(is_linear, loss_names)):
        # The gradient does not depend on the log-probabilities: one visit of the logits is enough.
        zeros = packed.split_by_example(np.zeros(len(packed.rows_P)))
        grad_P = _loss_grads(_compute_losses(parts, zeros))
        logprobs_P, dhidden_TD = scorer.logprobs_and_grad(grad_P)
        losses = _compute_losses(parts, packed.split_by_example(logprobs_P.cpu().numpy()))
        return losses, dhidden_TD
    losses = _compute_losses(parts, packed.split_by_example(scorer.logprobs().cpu().numpy()))
    return losses, scorer.backward(_loss_grads(losses)) if is_trained else None


def _compute_losses(parts: Iterable[_BatchPart], logprobs: Iterable[Floats]) -> list[_PartLoss]:
    """The loss of each pass, from the log-probabilities of all examples in packed order."""
    remaining, losses = iter(logprobs), []
    for part in parts:
        own = list(islice(remaining, len(part.example_indices)))
        loss = compute_loss(part.accumulator.work.request, part.examples, own)
        losses.append(_PartLoss(part, loss, own))
    return losses


def _loss_grads(losses: Iterable[_PartLoss]) -> Tensor:
    """The gradient of the losses by each log-probability; zero for forward-only passes."""
    grads = [
        np.zeros_like(loss.grad_P) if part.accumulator.gradient is None else loss.grad_P
        for part, loss, _ in losses
    ]
    return torch.from_numpy(np.concatenate(grads).astype(np.float32))
