"""Runs forward and backward passes of many adapters on one hosted model, and optimizer steps.

Passes are packed into micro-batches, which are divided among the ranks of this worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tinkex.engine.adapters import AdapterState, TrainableAdapter
from tinkex.engine.config import EngineConfig
from tinkex.engine.gradient_shards import ShardBatch, plan_batches, shards_of_rank
from tinkex.engine.losses import sum_metrics
from tinkex.engine.protocol import (
    EngineFailure,
    EngineLost,
    PassOutcome,
    PassSteps,
    StepRefused,
    check_step_params,
)
from tinkex.engine.shard_run import PassResult, PassWork, RankPlan, ShardRun
from tinkex.errors import RequestErrorCategory
from tinkex.logs import get_logger
from tinkex.nn.adamw import NonFiniteGradient, adamw_step, skipped_step_metrics
from tinkex.nn.muon import dimuon_step
from tinkex.types import AdamParams, ForwardBackwardOutput
from tinkex.types.optimizers import DimuonParams, OptimParams

if TYPE_CHECKING:
    from tinkex.nn.hosted_model import HostedModel

LOG = get_logger(__name__)


class FollowerRun(Protocol):
    """The part of an attempt to run passes that other ranks compute."""

    def step(self) -> None:
        """Let every rank compute its next micro-batch."""
        ...

    def collect(self) -> Sequence[Sequence[PassResult]]:
        """Wait for all ranks and return their results, without gradients; raises if one failed."""
        ...

    def sum_gradients(self, own: Sequence[PassResult]) -> Sequence[Tensor | None]:
        """Add the gradients of all ranks to this rank's, in the order of the tree; ends the run."""
        ...

    def discard(self, error: BaseException) -> None:
        """Drop the run on all ranks, because of an error; does nothing after its end."""
        ...


class Followers(Protocol):
    """The other ranks of this worker."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks, with this one."""
        ...

    def check(self) -> None:
        """Raise EngineLost if a rank is lost."""
        ...

    def start_run(
        self, base_model: str, passes: Sequence[PassWork], plans: Sequence[RankPlan]
    ) -> FollowerRun:
        """Begin an attempt to run passes; `plans` has the plan of each rank."""
        ...


@dataclass(frozen=True, slots=True)
class _NoFollowerRun:
    """A run without other ranks."""

    def step(self) -> None:
        """Do nothing."""

    def collect(self) -> Sequence[Sequence[PassResult]]:
        return ()

    def sum_gradients(self, own: Sequence[PassResult]) -> Sequence[Tensor | None]:
        return [result.gradient for result in own]

    def discard(self, error: BaseException) -> None:
        """Do nothing."""


class Trainer:
    """Runs passes on one base model, which is looked up again for every micro-batch."""

    def __init__(
        self,
        base_model: str,
        get_hosted_model: Callable[[], HostedModel],
        config: EngineConfig,
        followers: Followers | None = None,
    ) -> None:
        self._base_model = base_model
        self._get_hosted_model = get_hosted_model
        self._config = config
        self._followers = followers

    def run(self, passes: Sequence[PassWork]) -> PassSteps:
        """Run passes, together unless the engine is deterministic; returns one outcome each."""
        outcomes: dict[int, PassOutcome] = {}
        for indices in self._group(passes):
            if outcomes:
                yield 0
            group = [passes[index] for index in indices]
            done = yield from self._run_with_retries(group, self._config.micro_batch_tokens)
            outcomes.update(zip(indices, done, strict=True))
        return [outcomes[index] for index in range(len(passes))]

    def _group(self, passes: Sequence[PassWork]) -> list[list[int]]:
        """The passes that run together: all with the same number of shards.

        On a sharded base model all ranks must compute the same gradients, so each runs alone.
        """
        if self._config.is_deterministic or self._config.shard_base:
            return [[index] for index in range(len(passes))]
        groups: dict[int, list[int]] = {}
        for index, work in enumerate(passes):
            groups.setdefault(work.adapter.spec.gradient_shards, []).append(index)
        return list(groups.values())

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
        except EngineLost:
            raise
        except Exception as error:  # a failed pass must not stop the worker
            is_full, reason = is_out_of_memory(error), f"{type(error).__name__}: {error}"
            if not is_full:
                LOG.error("%d passes failed together", len(passes), exc_info=error)
        if self._followers is not None:
            self._followers.check()
        # Retry outside the handler: the traceback references the tensors of the failed attempt.
        if len(passes) > 1:
            half = len(passes) // 2
            first = yield from self._run_with_retries(passes[:half], max_tokens)
            return [*first, *(yield from self._run_with_retries(passes[half:], max_tokens))]
        if not is_full:
            message = f"the pass failed in the server: {reason}"
            return [EngineFailure(message, RequestErrorCategory.Server)]
        longest = max(len(example.tokens) for example in passes[0].examples.values())
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
        num_shards = passes[0].adapter.spec.gradient_shards
        plans = self._plan(passes, num_shards, max_tokens, checkpoint=checkpoint_activations)
        run = ShardRun(passes, plans[0], self._get_hosted_model)
        others = self._start_followers(passes, plans)
        num_rounds = max(len(plan.batches) for plan in plans)
        try:
            for index in range(num_rounds):
                if index:
                    yield _round_tokens(plans, index - 1)
                others.step()
                run.step()
            own = run.finish()
            results = [own, *others.collect()]
            gradients = others.sum_gradients(own)
            outputs = [
                _pass_output(work, [result[index] for result in results], gradients[index])
                for index, work in enumerate(passes)
            ]
        except BaseException as error:  # also if the run is cancelled
            others.discard(error)
            raise
        # Nothing after this line can fail, so either all passes take effect or none.
        for work, gradient, output in zip(passes, gradients, outputs, strict=True):
            if not isinstance(output, EngineFailure):
                _accumulate_gradient(work.adapter.state, gradient)
        return outputs

    def _plan(
        self, passes: Sequence[PassWork], num_shards: int, max_tokens: int, *, checkpoint: bool
    ) -> list[RankPlan]:
        """The plan of each rank."""
        lengths = [[len(work.examples[e].tokens) for e in sorted(work.examples)] for work in passes]
        batches = plan_batches(lengths, num_shards, max_tokens)
        is_first_try = max_tokens == self._config.micro_batch_tokens
        max_at_once = self._config.pass_tokens if is_first_try else max_tokens
        num_ranks = 1 if self._followers is None else self._followers.num_ranks
        plans = []
        for rank in range(num_ranks):
            shards = shards_of_rank(rank, num_ranks, num_shards)
            own = {number: one for number, one in enumerate(batches) if one.shard in shards}
            plan = RankPlan(
                shards=shards, batches=own, max_tokens_at_once=0 if checkpoint else max_at_once
            )
            plans.append(plan)
        return plans

    def _start_followers(
        self, passes: Sequence[PassWork], plans: Sequence[RankPlan]
    ) -> FollowerRun:
        if self._followers is None:
            return _NoFollowerRun()
        return self._followers.start_run(self._base_model, passes, plans)


def _round_tokens(plans: Sequence[RankPlan], index: int) -> int:
    """The number of tokens that all ranks compute in a round."""
    rounds: list[list[ShardBatch]] = [list(plan.batches.values()) for plan in plans]
    return sum(batches[index].num_tokens for batches in rounds if index < len(batches))


def _accumulate_gradient(state: AdapterState, gradient: Tensor | None) -> None:
    """Add a pass's gradient to its adapter's."""
    if state.gradient is None:
        state.gradient = gradient
    elif gradient is not None:
        state.gradient.add_(gradient)


def _pass_output(
    work: PassWork, results: Sequence[PassResult], gradient: Tensor | None
) -> PassOutcome:
    """The output of a pass, from the results of all ranks and the sum of their gradients."""
    logprobs = {index: value for one in results for index, value in one.logprobs.items()}
    losses = {number: loss for one in results for number, loss in one.losses.items()}
    errors = [losses[number].error for number in sorted(losses) if losses[number].error]
    if errors:
        return EngineFailure(errors[0], RequestErrorCategory.User)
    examples = [work.examples[index] for index in sorted(work.examples)]
    outputs = [example.to_output(logprobs[index]) for index, example in enumerate(examples)]
    # In the order of the micro-batches: the sum must not depend on the number of ranks.
    metrics = sum_metrics([losses[number] for number in sorted(losses)])
    metrics["tokens:sum"] = float(sum(len(example.tokens) for example in examples))
    if gradient is not None and not bool(gradient.sum().isfinite()):
        metrics["nonfinite_gradient:max"] = 1.0
    return ForwardBackwardOutput("ArrayRecord", outputs, metrics)


def optimizer_step(
    adapter: TrainableAdapter, params: OptimParams, *, apply_nonfinite: bool
) -> Mapping[str, float]:
    """Apply the accumulated gradient, clear it, and return metrics.

    Without a gradient, as in an `optim_step` that no `forward_backward` precedes, nothing changes:
    neither weights nor the step count, and not even weight decay is applied.
    """
    check_step_params(adapter.spec.optimizer, params)
    assert isinstance(params, AdamParams | DimuonParams)
    state = adapter.state
    if state.gradient is None:
        return skipped_step_metrics(state.weights, state.num_steps, params)
    try:
        metrics = _update(adapter, state.gradient, params, apply_nonfinite=apply_nonfinite)
    except NonFiniteGradient as error:
        state.gradient = None
        raise StepRefused(f"{error.message}; the gradient was dropped") from error
    state.gradient = None
    state.num_steps += 1
    return metrics


def _update(
    adapter: TrainableAdapter,
    gradient: Tensor,
    params: AdamParams | DimuonParams,
    *,
    apply_nonfinite: bool,
) -> Mapping[str, float]:
    """Change weights and moments."""
    state = adapter.state
    # Zeros already, unless the gradient is not finite.
    adapter.layout.clear_unadapted(gradient)
    number, moments = state.num_steps + 1, state.ensure_moments(adapter.spec)
    if isinstance(params, DimuonParams):
        (momentum,) = moments
        return dimuon_step(
            state.weights,
            gradient,
            momentum,
            number,
            params,
            adapter.layout,
            apply_nonfinite=apply_nonfinite,
        )
    first, second = moments
    return adamw_step(
        state.weights, gradient, first, second, number, params, apply_nonfinite=apply_nonfinite
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that CPU or GPU memory is exhausted."""
    is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_full or "can't allocate memory" in str(error)
