"""Losses from hidden states in chunks of positions, so full logits are never materialized.

Shape letters: P scored positions, p those of a chunk, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from tinkex.nn.ops.autograd import FunctionContext, call_kernel, can_use_kernels

#: Smaller chunks make matrix products slow; larger ones do not fit in the CPU caches.
CHUNK_ROWS = 512
#: Context of a function whose forward computes the gradients of hidden states and weight.
_GradientContext: TypeAlias = FunctionContext[tuple[Tensor, Tensor] | None]


class _WeightedCrossEntropyFunction(torch.autograd.Function):
    """Weighted sum of losses; a scalar output lets forward compute the gradient as well."""

    @staticmethod
    def forward(
        ctx: _GradientContext,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        targets_P: Tensor,
        weights_P: Tensor,
    ) -> Tensor:
        needs = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grads = (torch.empty_like(hidden_PD), torch.zeros_like(weight_VD)) if needs else None
        total = hidden_PD.new_zeros((), dtype=torch.float32)
        # All chunks share one buffer for logits, because page faults of new memory are slow.
        buffer_pV = hidden_PD.new_empty(min(CHUNK_ROWS, len(hidden_PD)), len(weight_VD))
        for rows in _chunks(len(hidden_PD)):
            h_pD, w_p = hidden_PD[rows], weights_P[rows]
            logits_pV = torch.mm(h_pD, weight_VD.t(), out=buffer_pV[: len(h_pD)])
            losses_p, dlogits_pV = _losses_and_grad(logits_pV, targets_P[rows], w_p)
            total += losses_p @ w_p
            if grads is None:
                continue
            dhidden_PD, dweight_VD = grads
            torch.mm(dlogits_pV, weight_VD, out=dhidden_PD[rows])
            dweight_VD.addmm_(dlogits_pV.t(), h_pD)
        ctx.state = grads
        return total

    @staticmethod
    def backward(ctx: _GradientContext, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        return _scale_gradients(ctx, dtotal)


class _TargetLogprobsFunction(torch.autograd.Function):
    """Log-probabilities of targets; the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: FunctionContext[None], hidden_PD: Tensor, weight_VD: Tensor, targets_P: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden_PD, weight_VD, targets_P)
        logprobs_P = hidden_PD.new_empty(len(hidden_PD), dtype=torch.float32)
        for rows in _chunks(len(hidden_PD)):
            logprobs_pV = _logprobs(hidden_PD[rows], weight_VD, 1.0)
            logprobs_P[rows] = logprobs_pV.gather(1, targets_P[rows, None]).squeeze(1)
        return logprobs_P

    @staticmethod
    def backward(ctx: FunctionContext[None], dlogprobs_P: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_PD, weight_VD, targets_P = ctx.saved_tensors
        dhidden_PD, dweight_VD = torch.empty_like(hidden_PD), torch.zeros_like(weight_VD)
        for rows in _chunks(len(hidden_PD)):
            h_pD, grad_p1 = hidden_PD[rows], dlogprobs_P[rows, None]
            dlogits_pV = _logprobs(h_pD, weight_VD, 1.0).exp_().mul_(-grad_p1)
            dlogits_pV.scatter_add_(1, targets_P[rows, None], grad_p1)
            dlogits_pV = dlogits_pV.to(h_pD.dtype)
            torch.mm(dlogits_pV, weight_VD, out=dhidden_PD[rows])
            dweight_VD.addmm_(dlogits_pV.t(), h_pD)
        return dhidden_PD, dweight_VD, None


class _TeacherKLFunction(torch.autograd.Function):
    """Sum of KL(teacher || student) at a temperature; the teacher gets no gradient."""

    @staticmethod
    def forward(
        ctx: _GradientContext,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        teacher: TeacherStates,
        temperature: float,
    ) -> Tensor:
        dhidden_PD, dweight_VD = torch.empty_like(hidden_PD), torch.zeros_like(weight_VD)
        total = hidden_PD.new_zeros((), dtype=torch.float32)
        for rows in _chunks(len(hidden_PD)):
            h_pD = hidden_PD[rows]
            student_pV = _logprobs(h_pD, weight_VD, temperature)
            teacher_pV = _logprobs(teacher.hidden_PD[rows], teacher.weight_VD, temperature)
            probs_pV = teacher_pV.exp()
            total += (probs_pV * (teacher_pV - student_pV)).sum()
            dlogits_pV = student_pV.exp_().sub_(probs_pV).div_(temperature).to(h_pD.dtype)
            torch.mm(dlogits_pV, weight_VD, out=dhidden_PD[rows])
            dweight_VD.addmm_(dlogits_pV.t(), h_pD)
        ctx.state = (dhidden_PD, dweight_VD)
        return total

    @staticmethod
    def backward(ctx: _GradientContext, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        return _scale_gradients(ctx, dtotal)


def _scale_gradients(ctx: _GradientContext, dtotal: Tensor) -> tuple[Tensor | None, ...]:
    assert ctx.state is not None
    dhidden_PD, dweight_VD = ctx.state
    return dhidden_PD.mul_(dtotal), dweight_VD.mul_(dtotal), None, None


class TeacherStates:
    """A teacher's last hidden states of the scored positions, and its output weight."""

    def __init__(self, hidden_PD: Tensor, weight_VD: Tensor) -> None:
        self.hidden_PD, self.weight_VD = hidden_PD, weight_VD


def weighted_cross_entropy(
    hidden_PD: Tensor, weight_VD: Tensor, targets_P: Tensor, weights_P: Tensor
) -> Tensor:
    """Sum over positions of weight times cross-entropy."""
    inputs = (hidden_PD, weight_VD.to(hidden_PD.dtype), targets_P, weights_P)
    total: Tensor = _WeightedCrossEntropyFunction.apply(*inputs)  # type: ignore[no-untyped-call]
    return total


def target_logprobs(hidden_PD: Tensor, weight_VD: Tensor, targets_P: Tensor) -> Tensor:
    """Log-probability of each position's target."""
    inputs = (hidden_PD, weight_VD.to(hidden_PD.dtype), targets_P)
    logprobs_P: Tensor = _TargetLogprobsFunction.apply(*inputs)  # type: ignore[no-untyped-call]
    return logprobs_P


def teacher_kl(
    hidden_PD: Tensor, weight_VD: Tensor, teacher: TeacherStates, temperature: float
) -> Tensor:
    """Sum over positions of KL(teacher || student) at a temperature."""
    inputs = (hidden_PD, weight_VD.to(hidden_PD.dtype), teacher, temperature)
    total: Tensor = _TeacherKLFunction.apply(*inputs)  # type: ignore[no-untyped-call]
    return total


def _losses_and_grad(logits_pV: Tensor, targets_p: Tensor, w_p: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of their weighted sum; may overwrite the logits."""
    if can_use_kernels(logits_pV) and w_p.dtype == torch.float32:
        num_rows, vocab_size = logits_pV.shape
        losses_p = logits_pV.new_empty(num_rows)
        call_kernel(
            *("cross_entropy_forward_backward", logits_pV, targets_p.contiguous()),
            *(w_p.contiguous(), num_rows, vocab_size, losses_p),
        )
        return losses_p, logits_pV
    logprobs_pV = torch.log_softmax(logits_pV.float(), dim=-1)
    losses_p = -logprobs_pV.gather(1, targets_p[:, None]).squeeze(1)
    dlogits_pV = logprobs_pV.exp_().mul_(w_p[:, None])
    dlogits_pV.scatter_add_(1, targets_p[:, None], -w_p[:, None])
    return losses_p, dlogits_pV.to(logits_pV.dtype)


def _logprobs(h_pD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    logits_pV = (h_pD @ weight_VD.t()).float()
    if temperature != 1.0:
        logits_pV.div_(temperature)
    return torch.log_softmax(logits_pV, dim=-1)


def _chunks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, CHUNK_ROWS):
        yield slice(start, min(start + CHUNK_ROWS, num_rows))
