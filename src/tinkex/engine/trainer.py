"""Runs passes of many adapters on one hosted model: packed, in micro-batches, exact.

The graph is cut at the hidden states: the head and the losses work on flat arrays outside autograd,
and only their pull on the hidden states goes back through the layers.

Shape letters: T rows, P pairs of (row, target).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.adapters import TrainableAdapter
from tinkex.engine.config import EngineConfig
from tinkex.engine.examples import TrainingExample
from tinkex.engine.losses import LossValue, compute_loss, get_loss, sum_metrics
from tinkex.engine.micro_batches import ExampleRef, PackedBatch, pack_examples, split_micro_batches
from tinkex.engine.protocol import EngineFailure, PassOutcome, PassSteps
from tinkex.errors import RequestErrorCategory
from tinkex.logs import get_logger
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.hosted_model import HostedModel
from tinkex.nn.lora_training import LoraSegment, SegmentedLora
from tinkex.nn.packed_attention import PackedAttention
from tinkex.nn.target_logprobs import TargetLogprobs
from tinkex.types import ForwardBackwardInput, ForwardBackwardOutput

LOG = get_logger(__name__)
Floats: TypeAlias = npt.NDArray[np.floating]
_PassExamples: TypeAlias = tuple[int, list[int]]
"""A pass of a micro-batch, and its examples there."""
#: Logits that may be kept from the forward to the backward half of a micro-batch.
MAX_LOGITS_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PassWork:
    """A pass of one adapter, read and found right."""

    adapter: TrainableAdapter
    request: ForwardBackwardInput
    examples: Sequence[TrainingExample]
    is_forward_only: bool


@dataclass(slots=True)
class _PassAccumulator:
    """What a pass has come to so far; nothing of it counts before all of it is done."""

    work: PassWork
    gradient: Tensor | None
    logprobs: dict[int, Floats] = field(default_factory=dict)
    losses: list[LossValue] = field(default_factory=list)
    """One per micro-batch."""


class Trainer:
    """Computes on one hosted model, which `find_host` returns for every micro-batch."""

    def __init__(self, get_hosted_model: Callable[[], HostedModel], config: EngineConfig) -> None:
        self._get_hosted_model = get_hosted_model
        self._config = config

    def run(self, passes: Sequence[PassWork]) -> PassSteps:
        """Run passes, together unless bits must not depend on company; one outcome each."""
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
        """Run passes; what does not fit into memory is tried again in smaller portions."""
        try:
            return (
                yield from self._run(
                    passes, max_tokens, checkpoint_activations=checkpoint_activations
                )
            )
        except Exception as error:
            is_full, reason = is_out_of_memory(error), f"{type(error).__name__}: {error}"
            if not is_full:
                LOG.error("%d passes failed together", len(passes), exc_info=error)
        # Out of the handler: its traceback holds the tensors that were in the way.
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
        sheets = [_new_accumulator(work) for work in passes]
        lengths = [[len(example.tokens) for example in work.examples] for work in passes]
        is_first_try = max_tokens == self._config.micro_batch_tokens
        max_at_once = self._config.pass_tokens if is_first_try else max_tokens
        num_tokens = 0
        for batch in split_micro_batches(lengths, max_tokens):
            if num_tokens:
                yield num_tokens
            num_tokens = sum(lengths[p][e] for p, e in batch)
            # Only an example that is too long by itself is worth computing twice.
            is_long = checkpoint_activations or num_tokens > max_at_once
            self._run_batch(sheets, batch, checkpoint_activations=is_long)
        outputs = [_pass_output(sheet) for sheet in sheets]
        # From here on nothing can fail: all passes count, or none.
        for sheet in sheets:
            _accumulate_gradient(sheet)
        return outputs

    def _run_batch(
        self,
        accumulators: Sequence[_PassAccumulator],
        batch: Sequence[ExampleRef],
        *,
        checkpoint_activations: bool,
    ) -> None:
        host = self._get_hosted_model()
        device = host.device
        packed = pack_examples([accumulators[p].work.examples[e] for p, e in batch])
        segments = _lora_segments(accumulators, batch)
        this = ForwardContext(segments, PackedAttention(packed.lengths))
        is_trained = any(accumulators[p].gradient is not None for p, _ in batch)
        with torch.set_grad_enabled(is_trained):
            hidden_TD = host.hidden_states(
                torch.from_numpy(packed.tokens_T).to(device),
                torch.from_numpy(packed.positions_T).to(device),
                this,
                checkpoint_activations=checkpoint_activations,
            )
        scorer = TargetLogprobs(
            host.lm_head,
            hidden_TD.detach(),
            segments,
            packed.rows_P,
            packed.targets_P,
            max_logits_bytes=MAX_LOGITS_BYTES,
            save_logprobs=is_trained,
        )
        dhidden_TD = _score_batch(scorer, accumulators, batch, packed)
        if hidden_TD.requires_grad:
            hidden_TD.backward(dhidden_TD)


def _new_accumulator(work: PassWork) -> _PassAccumulator:
    is_trained = not work.is_forward_only
    return _PassAccumulator(
        work, torch.zeros_like(work.adapter.state.weights) if is_trained else None
    )


def _group_by_pass(batch: Sequence[ExampleRef]) -> Iterator[_PassExamples]:
    """The passes of a micro-batch in the order of their rows, each with its examples."""
    found: dict[int, list[int]] = {}
    for pass_index, example_index in batch:
        found.setdefault(pass_index, []).append(example_index)
    yield from found.items()


def _lora_segments(
    accumulators: Sequence[_PassAccumulator], batch: Sequence[ExampleRef]
) -> SegmentedLora:
    segments, start = [], 0
    for pass_index, indices in _group_by_pass(batch):
        sheet = accumulators[pass_index]
        adapter, examples = sheet.work.adapter, sheet.work.examples
        stop = start + sum(len(examples[index].tokens) for index in indices)
        gradient = None if sheet.gradient is None else adapter.layout.views(sheet.gradient)
        segments.append(LoraSegment(start, stop, adapter.scale, adapter.weight_views, gradient))
        start = stop
    return SegmentedLora(segments)


def _score_batch(
    scorer: TargetLogprobs,
    accumulators: Sequence[_PassAccumulator],
    batch: Sequence[ExampleRef],
    packed: PackedBatch,
) -> Tensor | None:
    """Note log-probabilities and losses; returns the pull on the hidden states, if any."""
    passes = list(_group_by_pass(batch))
    if all(accumulators[p].gradient is None for p, _ in passes):
        _record_losses(
            accumulators, passes, packed.split_by_example(scorer.logprobs().cpu().numpy())
        )
        return None
    if all(get_loss(accumulators[p].work.request.loss_fn).is_linear for p, _ in passes):
        # The slopes do not depend on what the log-probabilities are: one visit does it all.
        slope_P = _loss_grads(
            accumulators, passes, packed.split_by_example(np.zeros(len(packed.rows_P)))
        )
        logprobs_P, dhidden_TD = scorer.logprobs_and_grad(slope_P)
        _record_losses(accumulators, passes, packed.split_by_example(logprobs_P.cpu().numpy()))
        return dhidden_TD
    logprobs = packed.split_by_example(scorer.logprobs().cpu().numpy())
    _record_losses(accumulators, passes, logprobs)
    return scorer.backward(_loss_grads(accumulators, passes, logprobs))


def _batch_losses(
    accumulators: Sequence[_PassAccumulator],
    passes: Sequence[_PassExamples],
    logprobs: Iterable[Floats],
) -> Iterator[tuple[_PassAccumulator, LossValue, dict[int, Floats]]]:
    """Each pass's loss in a micro-batch, with the log-probabilities of its examples."""
    parts = iter(logprobs)
    for pass_index, indices in passes:
        sheet = accumulators[pass_index]
        own = dict(zip(indices, islice(parts, len(indices)), strict=True))
        examples = [sheet.work.examples[index] for index in indices]
        yield sheet, compute_loss(sheet.work.request, examples, list(own.values())), own


def _record_losses(
    accumulators: Sequence[_PassAccumulator],
    passes: Sequence[_PassExamples],
    logprobs: Iterable[Floats],
) -> None:
    for sheet, loss, own in _batch_losses(accumulators, passes, logprobs):
        sheet.logprobs |= own
        sheet.losses.append(loss)


def _loss_grads(
    accumulators: Sequence[_PassAccumulator],
    passes: Sequence[_PassExamples],
    logprobs: Iterable[Floats],
) -> Tensor:
    """How the losses change with each log-probability; not at all where nothing is trained."""
    slopes = [
        np.zeros_like(loss.grad_P) if sheet.gradient is None else loss.grad_P
        for sheet, loss, _ in _batch_losses(accumulators, passes, logprobs)
    ]
    return torch.from_numpy(np.concatenate(slopes).astype(np.float32))


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, as the CPU and the GPU say it."""
    is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_full or "can't allocate memory" in str(error)
