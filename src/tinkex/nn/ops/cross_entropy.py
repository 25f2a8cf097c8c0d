"""From hidden states to losses in chunks of rows: logits of all rows never exist at once.

Shape letters: P positions that count, p those of a chunk, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tinkex.nn.ops import training_kernels

#: Matrix products of fewer rows are slow; more rows leave the caches.
CHUNK_ROWS = 512


class _WeightedCrossEntropyFunction(torch.autograd.Function):
    """Sum of -weight * log-probability; the gradient is known at once, as the sum is all."""

    @staticmethod
    def forward(
        ctx: Any, hidden_PD: Tensor, weight_VD: Tensor, targets_P: Tensor, weights_P: Tensor
    ) -> Tensor:
        needs = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dhidden_PD = torch.empty_like(hidden_PD) if needs else None
        dweight_VD = torch.zeros_like(weight_VD) if needs else None
        total = hidden_PD.new_zeros((), dtype=torch.float32)
        # One memory for the logits of all chunks: fresh memory costs more than what is done in it.
        room_pV = hidden_PD.new_empty(min(CHUNK_ROWS, len(hidden_PD)), len(weight_VD))
        for rows in _chunks(len(hidden_PD)):
            h_pD, w_p = hidden_PD[rows], weights_P[rows]
            logits_pV = torch.mm(h_pD, weight_VD.t(), out=room_pV[: len(h_pD)])
            losses_p, slope_pV = _losses_and_grad(logits_pV, targets_P[rows], w_p)
            total += losses_p @ w_p
            if dhidden_PD is None or dweight_VD is None:
                continue
            torch.mm(slope_pV, weight_VD, out=dhidden_PD[rows])
            dweight_VD.addmm_(slope_pV.t(), h_pD)
        ctx.gradients = (dhidden_PD, dweight_VD)
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_PD, dweight_VD = ctx.gradients
        return dhidden_PD.mul_(dtotal), dweight_VD.mul_(dtotal), None, None


class _TargetLogprobsFunction(torch.autograd.Function):
    """Log-probabilities of targets; logits are made a second time on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden_PD: Tensor, weight_VD: Tensor, targets_P: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_PD, weight_VD, targets_P)
        found_P = hidden_PD.new_empty(len(hidden_PD), dtype=torch.float32)
        for rows in _chunks(len(hidden_PD)):
            logprobs_pV = _logprobs(hidden_PD[rows], weight_VD, 1.0)
            found_P[rows] = logprobs_pV.gather(1, targets_P[rows, None]).squeeze(1)
        return found_P

    @staticmethod
    def backward(ctx: Any, dfound_P: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_PD, weight_VD, targets_P = ctx.saved_tensors
        dhidden_PD, dweight_VD = torch.empty_like(hidden_PD), torch.zeros_like(weight_VD)
        for rows in _chunks(len(hidden_PD)):
            h_pD, slope_p1 = hidden_PD[rows], dfound_P[rows, None]
            slope_pV = _logprobs(h_pD, weight_VD, 1.0).exp_().mul_(-slope_p1)
            slope_pV.scatter_add_(1, targets_P[rows, None], slope_p1)
            slope_pV = slope_pV.to(h_pD.dtype)
            torch.mm(slope_pV, weight_VD, out=dhidden_PD[rows])
            dweight_VD.addmm_(slope_pV.t(), h_pD)
        return dhidden_PD, dweight_VD, None


class _TeacherKLFunction(torch.autograd.Function):
    """Sum of KL(teacher || student) at a temperature; only the student is pulled."""

    @staticmethod
    def forward(
        ctx: Any, hidden_PD: Tensor, weight_VD: Tensor, teacher: TeacherStates, temperature: float
    ) -> Tensor:
        dhidden_PD, dweight_VD = torch.empty_like(hidden_PD), torch.zeros_like(weight_VD)
        total = hidden_PD.new_zeros((), dtype=torch.float32)
        for rows in _chunks(len(hidden_PD)):
            h_pD = hidden_PD[rows]
            student_pV = _logprobs(h_pD, weight_VD, temperature)
            teacher_pV = _logprobs(teacher.hidden_PD[rows], teacher.weight_VD, temperature)
            chances_pV = teacher_pV.exp()
            total += (chances_pV * (teacher_pV - student_pV)).sum()
            slope_pV = student_pV.exp_().sub_(chances_pV).div_(temperature).to(h_pD.dtype)
            torch.mm(slope_pV, weight_VD, out=dhidden_PD[rows])
            dweight_VD.addmm_(slope_pV.t(), h_pD)
        ctx.gradients = (dhidden_PD, dweight_VD)
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_PD, dweight_VD = ctx.gradients
        return dhidden_PD.mul_(dtotal), dweight_VD.mul_(dtotal), None, None


class TeacherStates:
    """What a teacher thinks of the positions that count."""

    def __init__(self, hidden_PD: Tensor, weight_VD: Tensor) -> None:
        self.hidden_PD, self.weight_VD = hidden_PD, weight_VD


def weighted_cross_entropy(
    hidden_PD: Tensor, weight_VD: Tensor, targets_P: Tensor, weights_P: Tensor
) -> Tensor:
    """The sum over positions of weight times cross-entropy."""
    inputs = (hidden_PD, weight_VD.to(hidden_PD.dtype), targets_P, weights_P)
    total: Tensor = _WeightedCrossEntropyFunction.apply(*inputs)  # type: ignore[no-untyped-call]
    return total


def target_logprobs(hidden_PD: Tensor, weight_VD: Tensor, targets_P: Tensor) -> Tensor:
    """The log-probability of each position's target."""
    inputs = (hidden_PD, weight_VD.to(hidden_PD.dtype), targets_P)
    found_P: Tensor = _TargetLogprobsFunction.apply(*inputs)  # type: ignore[no-untyped-call]
    return found_P


def teacher_kl(
    hidden_PD: Tensor, weight_VD: Tensor, teacher: TeacherStates, temperature: float
) -> Tensor:
    """The sum over positions of how far the student is from its teacher."""
    inputs = (hidden_PD, weight_VD.to(hidden_PD.dtype), teacher, temperature)
    total: Tensor = _TeacherKLFunction.apply(*inputs)  # type: ignore[no-untyped-call]
    return total


def _losses_and_grad(logits_pV: Tensor, targets_p: Tensor, w_p: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of their weighted sum; the logits may be used up."""
    if training_kernels.can_use_training_kernels(logits_pV) and w_p.dtype == torch.float32:
        losses_p = training_kernels.cross_entropy_forward_backward(
            logits_pV, targets_p.contiguous(), w_p.contiguous()
        )
        return losses_p, logits_pV
    logprobs_pV = torch.log_softmax(logits_pV.float(), dim=-1)
    losses_p = -logprobs_pV.gather(1, targets_p[:, None]).squeeze(1)
    slope_pV = logprobs_pV.exp_().mul_(w_p[:, None])
    slope_pV.scatter_add_(1, targets_p[:, None], -w_p[:, None])
    return losses_p, slope_pV.to(logits_pV.dtype)


def _logprobs(h_pD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    logits_pV = (h_pD @ weight_VD.t()).float()
    if temperature != 1.0:
        logits_pV.div_(temperature)
    return torch.log_softmax(logits_pV, dim=-1)


def _chunks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, CHUNK_ROWS):
        yield slice(start, min(start + CHUNK_ROWS, num_rows))
