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

from tinkex.engine.adapters import Adapter
from tinkex.engine.collate import Packed, Piece, cut, pack
from tinkex.engine.config import EngineConfig
from tinkex.engine.examples import Example
from tinkex.engine.losses import Loss, find_loss, score, sum_up
from tinkex.engine.pass_run import PassOutcome, PassSteps
from tinkex.engine.protocol import Failure
from tinkex.errors import RequestErrorCategory
from tinkex.logs import get_logger
from tinkex.nn.attention import PackedAttention
from tinkex.nn.host import HostedModel
from tinkex.nn.running import ForwardContext
from tinkex.nn.segments import LoraSegment, SegmentedLora
from tinkex.nn.unembed import TargetLogprobs
from tinkex.types import ForwardBackwardInput, ForwardBackwardOutput

LOG = get_logger(__name__)
Floats: TypeAlias = npt.NDArray[np.floating]
_PassPieces: TypeAlias = tuple[int, list[int]]
"""A pass of a micro-batch, and its examples there."""
#: Logits that may be kept from the forward to the backward half of a micro-batch.
MAX_LOGITS_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Work:
    """A pass of one adapter, read and found right."""

    adapter: Adapter
    request: ForwardBackwardInput
    examples: Sequence[Example]
    is_forward_only: bool


@dataclass(slots=True)
class _Sheet:
    """What a pass has come to so far; nothing of it counts before all of it is done."""

    work: Work
    gradient: Tensor | None
    logprobs: dict[int, Floats] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    """One per micro-batch."""


class Trainer:
    """Computes on one hosted model, which `find_host` returns for every micro-batch."""

    def __init__(self, find_host: Callable[[], HostedModel], config: EngineConfig) -> None:
        self._find_host = find_host
        self._config = config

    def run(self, works: Sequence[Work]) -> PassSteps:
        """Run passes, together unless bits must not depend on company; one outcome each."""
        outcomes: list[PassOutcome] = []
        groups = [[work] for work in works] if self._config.is_deterministic else [works]
        for group in groups:
            if outcomes:
                yield 0
            outcomes += yield from self._attempt(group, self._config.micro_batch_tokens)
        return outcomes

    def _attempt(
        self, works: Sequence[Work], max_tokens: int, *, save_memory: bool = False
    ) -> PassSteps:
        """Run passes; what does not fit into memory is tried again in smaller portions."""
        try:
            return (yield from self._run(works, max_tokens, save_memory=save_memory))
        except Exception as error:
            is_full, reason = is_out_of_memory(error), f"{type(error).__name__}: {error}"
            if not is_full:
                LOG.error("%d passes failed together", len(works), exc_info=error)
        # Out of the handler: its traceback holds the tensors that were in the way.
        if len(works) > 1:
            half = len(works) // 2
            first = yield from self._attempt(works[:half], max_tokens)
            return [*first, *(yield from self._attempt(works[half:], max_tokens))]
        if not is_full:
            message = f"the pass failed in the server: {reason}"
            return [Failure(message, RequestErrorCategory.Server)]
        longest = max(len(example.tokens) for example in works[0].examples)
        if longest < max_tokens:
            return (yield from self._attempt(works, max(longest, max_tokens // 2)))
        if not save_memory:
            return (yield from self._attempt(works, max_tokens, save_memory=True))
        return [
            Failure(
                f"there is not enough memory for an example of {longest} tokens; send shorter ones",
                RequestErrorCategory.Server,
            )
        ]

    def _run(self, works: Sequence[Work], max_tokens: int, *, save_memory: bool) -> PassSteps:
        sheets = [_new_sheet(work) for work in works]
        lengths = [[len(example.tokens) for example in work.examples] for work in works]
        is_first_try = max_tokens == self._config.micro_batch_tokens
        max_at_once = self._config.pass_tokens if is_first_try else max_tokens
        num_tokens = 0
        for batch in cut(lengths, max_tokens):
            if num_tokens:
                yield num_tokens
            num_tokens = sum(lengths[p][e] for p, e in batch)
            # Only an example that is too long by itself is worth computing twice.
            is_long = save_memory or num_tokens > max_at_once
            self._run_batch(sheets, batch, save_memory=is_long)
        outputs = [_output(sheet) for sheet in sheets]
        # From here on nothing can fail: all passes count, or none.
        for sheet in sheets:
            _commit(sheet)
        return outputs

    def _run_batch(
        self, sheets: Sequence[_Sheet], batch: Sequence[Piece], *, save_memory: bool
    ) -> None:
        host = self._find_host()
        device = host.device
        packed = pack([sheets[p].work.examples[e] for p, e in batch])
        segments = _segments(sheets, batch)
        this = ForwardContext(segments, PackedAttention(packed.lengths))
        is_trained = any(sheets[p].gradient is not None for p, _ in batch)
        with torch.set_grad_enabled(is_trained):
            hidden_TD = host.hidden_states(
                torch.from_numpy(packed.tokens_T).to(device),
                torch.from_numpy(packed.positions_T).to(device),
                this,
                checkpoint_activations=save_memory,
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
        dhidden_TD = _score(scorer, sheets, batch, packed)
        if hidden_TD.requires_grad:
            hidden_TD.backward(dhidden_TD)


def _new_sheet(work: Work) -> _Sheet:
    is_trained = not work.is_forward_only
    return _Sheet(work, torch.zeros_like(work.adapter.state.weights) if is_trained else None)


def _by_pass(batch: Sequence[Piece]) -> Iterator[_PassPieces]:
    """The passes of a micro-batch in the order of their rows, each with its examples."""
    found: dict[int, list[int]] = {}
    for pass_index, example_index in batch:
        found.setdefault(pass_index, []).append(example_index)
    yield from found.items()


def _segments(sheets: Sequence[_Sheet], batch: Sequence[Piece]) -> SegmentedLora:
    segments, start = [], 0
    for pass_index, indices in _by_pass(batch):
        sheet = sheets[pass_index]
        adapter, examples = sheet.work.adapter, sheet.work.examples
        stop = start + sum(len(examples[index].tokens) for index in indices)
        gradient = None if sheet.gradient is None else adapter.layout.views(sheet.gradient)
        segments.append(LoraSegment(start, stop, adapter.scale, adapter.views, gradient))
        start = stop
    return SegmentedLora(segments)


def _score(
    scorer: TargetLogprobs, sheets: Sequence[_Sheet], batch: Sequence[Piece], packed: Packed
) -> Tensor | None:
    """Note log-probabilities and losses; returns the pull on the hidden states, if any."""
    passes = list(_by_pass(batch))
    if all(sheets[p].gradient is None for p, _ in passes):
        _note(sheets, passes, packed.split(scorer.logprobs().cpu().numpy()))
        return None
    if all(find_loss(sheets[p].work.request.loss_fn).is_linear for p, _ in passes):
        # The slopes do not depend on what the log-probabilities are: one visit does it all.
        slope_P = _slopes(sheets, passes, packed.split(np.zeros(len(packed.rows_P))))
        logprobs_P, dhidden_TD = scorer.logprobs_and_grad(slope_P)
        _note(sheets, passes, packed.split(logprobs_P.cpu().numpy()))
        return dhidden_TD
    logprobs = packed.split(scorer.logprobs().cpu().numpy())
    _note(sheets, passes, logprobs)
    return scorer.backward(_slopes(sheets, passes, logprobs))


def _losses(
    sheets: Sequence[_Sheet], passes: Sequence[_PassPieces], logprobs: Iterable[Floats]
) -> Iterator[tuple[_Sheet, Loss, dict[int, Floats]]]:
    """Each pass's loss in a micro-batch, with the log-probabilities of its examples."""
    parts = iter(logprobs)
    for pass_index, indices in passes:
        sheet = sheets[pass_index]
        own = dict(zip(indices, islice(parts, len(indices)), strict=True))
        examples = [sheet.work.examples[index] for index in indices]
        yield sheet, score(sheet.work.request, examples, list(own.values())), own


def _note(
    sheets: Sequence[_Sheet], passes: Sequence[_PassPieces], logprobs: Iterable[Floats]
) -> None:
    for sheet, loss, own in _losses(sheets, passes, logprobs):
        sheet.logprobs |= own
        sheet.losses.append(loss)


def _slopes(
    sheets: Sequence[_Sheet], passes: Sequence[_PassPieces], logprobs: Iterable[Floats]
) -> Tensor:
    """How the losses change with each log-probability; not at all where nothing is trained."""
    slopes = [
        np.zeros_like(loss.slope_P) if sheet.gradient is None else loss.slope_P
        for sheet, loss, _ in _losses(sheets, passes, logprobs)
    ]
    return torch.from_numpy(np.concatenate(slopes).astype(np.float32))


def _commit(sheet: _Sheet) -> None:
    """Add a pass's gradient to its adapter's."""
    state = sheet.work.adapter.state
    if state.gradient is None:
        state.gradient = sheet.gradient
    elif sheet.gradient is not None:
        state.gradient.add_(sheet.gradient)


def _output(sheet: _Sheet) -> ForwardBackwardOutput:
    examples = sheet.work.examples
    outputs = [example.output(sheet.logprobs[index]) for index, example in enumerate(examples)]
    return ForwardBackwardOutput("ArrayRecord", outputs, _metrics(sheet))


def _metrics(sheet: _Sheet) -> dict[str, float]:
    metrics = sum_up(sheet.losses)
    metrics["tokens:sum"] = float(sum(len(example.tokens) for example in sheet.work.examples))
    if sheet.gradient is not None and not bool(sheet.gradient.sum().isfinite()):
        metrics["nonfinite_gradient:max"] = 1.0
    return metrics


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, as the CPU and the GPU say it."""
    is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_full or "can't allocate memory" in str(error)
