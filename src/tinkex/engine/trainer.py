"""Runs forward and backward passes of many adapters on one hosted model, and optimizer steps.

Passes are packed into micro-batches.

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

from tinkex.engine.adapters import AdapterState, TrainableAdapter
from tinkex.engine.config import EngineConfig
from tinkex.engine.examples import TrainingExample
from tinkex.engine.losses import LossValue, compute_loss, get_loss, sum_metrics
from tinkex.engine.micro_batches import ExampleRef, PackedBatch, pack_examples, split_micro_batches
from tinkex.engine.protocol import EngineFailure, PassOutcome, PassSteps, StepRefused
from tinkex.errors import RequestErrorCategory
from tinkex.logs import get_logger
from tinkex.nn.adamw import NonFiniteGradient, adamw_step, skipped_step_metrics
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.lora_training import LoraSegment, SegmentedLora
from tinkex.nn.packed_attention import PackedAttention
from tinkex.nn.target_logprobs import TargetLogprobs
from tinkex.types import AdamParams, ForwardBackwardInput, ForwardBackwardOutput

if TYPE_CHECKING:
    from tinkex.nn.hosted_model import HostedModel

LOG = get_logger(__name__)
Floats: TypeAlias = npt.NDArray[np.floating]
#: Logits that may be kept from the forward to the backward half of a micro-batch.
MAX_LOGITS_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PassWork:
    """A validated pass of one adapter."""

    adapter: TrainableAdapter
    request: ForwardBackwardInput
    examples: Sequence[TrainingExample]
    is_forward_only: bool


@dataclass(slots=True)
class _PassAccumulator:
    """Intermediate results of a pass; they take effect when all its micro-batches are done."""

    work: PassWork
    gradient: Tensor | None
    logprobs: dict[int, Floats] = field(default_factory=dict)
    losses: list[LossValue] = field(default_factory=list)
    """One per micro-batch."""


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


class Trainer:
    """Runs passes on one hosted model, which is looked up again for every micro-batch."""

    def __init__(self, get_hosted_model: Callable[[], HostedModel], config: EngineConfig) -> None:
        self._get_hosted_model = get_hosted_model
        self._config = config

    def run(self, passes: Sequence[PassWork]) -> PassSteps:
        """Run passes, together unless the engine is deterministic; returns one outcome each."""
        outcomes: list[PassOutcome] = []
        groups = [[work] for work in passes] if self._config.is_deterministic else [passes]
        for group in groups:
            if outcomes:
                yield 0
            outcomes += yield from self._run_with_retries(group, self._config.micro_batch_tokens)
        return outcomes

    def _run_with_retries(
        self, passes: Sequence[PassWork], max_tokens: int, *, checkpoint_activations: bool = False
    ) -> PassSteps:
        """Run passes; retries with fewer passes, then fewer tokens, if they run out of memory."""
        try:
            return (
                yield from self._run(
                    passes, max_tokens, checkpoint_activations=checkpoint_activations
                )
            )
        except Exception as error:  # a failed pass must not stop the worker
            is_full, reason = is_out_of_memory(error), f"{type(error).__name__}: {error}"
            if not is_full:
                LOG.error("%d passes failed together", len(passes), exc_info=error)
        # Retry outside the handler: the traceback references the tensors of the failed attempt.
        if len(passes) > 1:
            half = len(passes) // 2
            first = yield from self._run_with_retries(passes[:half], max_tokens)
            return [*first, *(yield from self._run_with_retries(passes[half:], max_tokens))]
        if not is_full:
            message = f"the pass failed in the server: {reason}"
            return [EngineFailure(message, RequestErrorCategory.Server)]
        longest = max(len(example.tokens) for example in passes[0].examples)
        if longest < max_tokens:
            return (yield from self._run_with_retries(passes, max(longest, max_tokens // 2)))
        if not checkpoint_activations:
            return (
                yield from self._run_with_retries(passes, max_tokens, checkpoint_activations=True)
            )
        return [
            EngineFailure(
                f"there is not enough memory for an example of {longest} tokens; send shorter ones",
                RequestErrorCategory.Server,
            )
        ]

    def _run(
        self, passes: Sequence[PassWork], max_tokens: int, *, checkpoint_activations: bool
    ) -> PassSteps:
        accumulators = [_new_accumulator(work) for work in passes]
        lengths = [[len(example.tokens) for example in work.examples] for work in passes]
        is_first_try = max_tokens == self._config.micro_batch_tokens
        max_at_once = self._config.pass_tokens if is_first_try else max_tokens
        num_tokens = 0
        for batch in split_micro_batches(lengths, max_tokens):
            if num_tokens:
                yield num_tokens
            num_tokens = sum(lengths[p][e] for p, e in batch)
            # Recomputing activations is worthwhile only for an example that exceeds the limit.
            is_long = checkpoint_activations or num_tokens > max_at_once
            self._run_batch(_group_by_pass(accumulators, batch), checkpoint_activations=is_long)
        outputs = [_pass_output(accumulator) for accumulator in accumulators]
        # Nothing after this line can fail, so either all passes take effect or none.
        for accumulator in accumulators:
            _accumulate_gradient(accumulator)
        return outputs

    def _run_batch(self, parts: Sequence[_BatchPart], *, checkpoint_activations: bool) -> None:
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
        dhidden_TD = _score_batch(scorer, parts, packed)
        if hidden_TD.requires_grad:
            hidden_TD.backward(dhidden_TD)


def _new_accumulator(work: PassWork) -> _PassAccumulator:
    is_trained = not work.is_forward_only
    return _PassAccumulator(
        work, torch.zeros_like(work.adapter.state.weights) if is_trained else None
    )


def _group_by_pass(
    accumulators: Sequence[_PassAccumulator], batch: Sequence[ExampleRef]
) -> list[_BatchPart]:
    """The passes of a micro-batch with their examples, in the order of the packed tokens."""
    indices: dict[int, list[int]] = {}
    for pass_index, example_index in batch:
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
) -> Tensor | None:
    """Record log-probabilities and losses; return the gradient of the hidden states, if any."""
    is_trained = any(part.accumulator.gradient is not None for part in parts)
    loss_names = {part.accumulator.work.request.loss_fn for part in parts}
    if is_trained and all(get_loss(name).is_linear for name in loss_names):
        # The gradient does not depend on the log-probabilities: one visit of the logits is enough.
        zeros = packed.split_by_example(np.zeros(len(packed.rows_P)))
        grad_P = _loss_grads(_compute_losses(parts, zeros))
        logprobs_P, dhidden_TD = scorer.logprobs_and_grad(grad_P)
        _record_losses(_compute_losses(parts, packed.split_by_example(logprobs_P.cpu().numpy())))
        return dhidden_TD
    losses = _compute_losses(parts, packed.split_by_example(scorer.logprobs().cpu().numpy()))
    _record_losses(losses)
    return scorer.backward(_loss_grads(losses)) if is_trained else None


def _compute_losses(parts: Iterable[_BatchPart], logprobs: Iterable[Floats]) -> list[_PartLoss]:
    """The loss of each pass, from the log-probabilities of all examples in packed order."""
    remaining, losses = iter(logprobs), []
    for part in parts:
        own = list(islice(remaining, len(part.example_indices)))
        loss = compute_loss(part.accumulator.work.request, part.examples, own)
        losses.append(_PartLoss(part, loss, own))
    return losses


def _record_losses(losses: Iterable[_PartLoss]) -> None:
    for part, loss, logprobs in losses:
        part.accumulator.logprobs |= dict(zip(part.example_indices, logprobs, strict=True))
        part.accumulator.losses.append(loss)


def _loss_grads(losses: Iterable[_PartLoss]) -> Tensor:
    """The gradient of the losses by each log-probability; zero for forward-only passes."""
    grads = [
        np.zeros_like(loss.grad_P) if part.accumulator.gradient is None else loss.grad_P
        for part, loss, _ in losses
    ]
    return torch.from_numpy(np.concatenate(grads).astype(np.float32))


def _accumulate_gradient(accumulator: _PassAccumulator) -> None:
    """Add a pass's gradient to its adapter's."""
    state = accumulator.work.adapter.state
    if state.gradient is None:
        state.gradient = accumulator.gradient
    elif accumulator.gradient is not None:
        state.gradient.add_(accumulator.gradient)


def _pass_output(accumulator: _PassAccumulator) -> ForwardBackwardOutput:
    examples = accumulator.work.examples
    outputs = [
        example.to_output(accumulator.logprobs[index]) for index, example in enumerate(examples)
    ]
    return ForwardBackwardOutput("ArrayRecord", outputs, _pass_metrics(accumulator))


def _pass_metrics(accumulator: _PassAccumulator) -> dict[str, float]:
    metrics = sum_metrics(accumulator.losses)
    metrics["tokens:sum"] = float(sum(len(example.tokens) for example in accumulator.work.examples))
    if accumulator.gradient is not None and not bool(accumulator.gradient.sum().isfinite()):
        metrics["nonfinite_gradient:max"] = 1.0
    return metrics


def optimizer_step(
    state: AdapterState, params: AdamParams, *, apply_nonfinite: bool
) -> Mapping[str, float]:
    """Apply the accumulated gradient with AdamW, clear it, and return metrics.

    Without a gradient, as in an `optim_step` that no `forward_backward` precedes, nothing changes:
    neither weights nor the step count, and not even weight decay is applied.
    """
    first, second = state.ensure_moments()
    if state.gradient is None:
        return skipped_step_metrics(state.weights, state.num_steps, params)
    try:
        metrics = adamw_step(
            state.weights,
            state.gradient,
            first,
            second,
            state.num_steps + 1,
            params,
            apply_nonfinite=apply_nonfinite,
        )
    except NonFiniteGradient as error:
        state.gradient = None
        raise StepRefused(f"{error.message}; the gradient was dropped") from error
    state.gradient = None
    state.num_steps += 1
    return metrics


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that CPU or GPU memory is exhausted."""
    is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_full or "can't allocate memory" in str(error)
