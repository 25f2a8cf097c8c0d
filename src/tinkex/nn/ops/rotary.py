"""Rotary position embedding (RoPE): cos/sin tables, and rotation of queries and keys.

Shape letters: T token positions, P positions of a table, N heads, H query heads, G key heads,
K head width, h half of it.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tinkex.nn.ops.autograd import (
    NUM_PARTIALS,
    FunctionContext,
    call_kernel,
    can_use_kernels,
)
from tinkex.nn.ops.library import LANES
from tinkex.nn.ops.rms_norm import FrozenRMSNorm, rms_norm

#: RoPE types whose angles depend only on the position, not on the sequence length.
_STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
_FIRST_POSITIONS = 512
#: Widest head that the kernels of training accept (MAX_HEAD_DIM in `rotary.c`).
_MAX_HEAD_DIM = 512


# --- tables ---------------------------------------------------------------------------------------


class RotaryTable(nn.Module):
    """Replacement for a rotary embedding module that looks cos and sin up in a table."""

    def __init__(self, original: nn.Module, like: Tensor) -> None:
        """`like` has the dtype and device of the model's activations."""
        super().__init__()
        self._original, self._like = original, like
        self._cos_PK = self._sin_PK = self._signed_sin_PK = like.new_empty(0, 0)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the positions, (1, T, K) each; transformers calls this."""
        cos_PK, sin_PK = self.cos_sin_table(int(position_ids.max()) + 1)
        positions_T = position_ids[0]
        return cos_PK[positions_T].unsqueeze(0), sin_PK[positions_T].unsqueeze(0)

    def cos_sin_table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of at least the first `num_positions` positions, (P, K) each."""
        if num_positions > len(self._cos_PK):
            # Doubling keeps the total cost of growing proportional to the final size.
            size = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            positions = torch.arange(size, device=self._like.device).unsqueeze(0)
            # Not called as a module: forward hooks on the original must see only the model's calls.
            cos, sin = self._original.forward(self._like, positions)
            self._cos_PK, self._sin_PK = cos[0].contiguous(), sin[0].contiguous()
            self._signed_sin_PK = signed_sin(sin[0])
        return self._cos_PK, self._sin_PK

    def signed_cos_sin(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin of the positions, (T, K) each."""
        self.cos_sin_table(int(positions_T.max()) + 1)
        return self._cos_PK[positions_T], self._signed_sin_PK[positions_T]


def signed_sin(sin: Tensor) -> Tensor:
    """Negate the first half: x * cos + swap_halves(x) * signed_sin(sin) rotates x."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)


def rotary_candidates(module: nn.Module) -> list[RotaryTable]:
    """Tables that may be equivalent to a module; none if it is not a static rotary embedding."""
    frequencies: object = getattr(module, "inv_freq", None)
    kind = getattr(module, "rope_type", None)
    if not isinstance(frequencies, Tensor) or kind not in _STATIC_ROPE_TYPES:
        return []
    return [RotaryTable(module, frequencies.new_zeros(1, dtype=torch.float32))]


def max_positions(config: object) -> int | None:
    """Longest sequence whose RoPE angles are independent of its length; None if unlimited."""
    rope = getattr(config, "rope_parameters", None) or {}
    configs = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = [
        int(config["original_max_position_embeddings"])
        for config in configs
        if config.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


# --- hosted models: frozen norms ------------------------------------------------------------------


class HeadLayout(NamedTuple):
    """Number of query and key heads in a merged QKV projection, and their frozen norm."""

    num_query_heads: int
    num_kv_heads: int
    norm: FrozenRMSNorm | None

    @property
    def sizes(self) -> list[int]:
        """Number of query, key and value heads."""
        return [self.num_query_heads, self.num_kv_heads, self.num_kv_heads]

    @property
    def num_rotated(self) -> int:
        """Number of heads that are rotated: queries and keys."""
        return self.num_query_heads + self.num_kv_heads


class RotaryAngles(NamedTuple):
    """cos and signed sin of the token positions of a forward pass."""

    cos_T1K: Tensor
    signed_sin_T1K: Tensor

    def apply(self, x_TNK: Tensor) -> Tensor:
        """Rotate heads, in a new tensor."""
        half = x_TNK.shape[-1] // 2
        return (x_TNK * self.cos_T1K).addcmul_(x_TNK.roll(half, -1), self.signed_sin_T1K)

    def backward(self, dy_TNK: Tensor) -> Tensor:
        """Return the gradient w.r.t. the heads in a new tensor."""
        half = dy_TNK.shape[-1] // 2
        return (dy_TNK * self.signed_sin_T1K).roll(half, -1).addcmul_(dy_TNK, self.cos_T1K)


def split_frozen_qkv_rotary(
    qkv_TNK: Tensor, layout: HeadLayout, angles: RotaryAngles
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed and rotated queries and keys, and values.

    Differentiable in torch; without gradients the C kernel may overwrite `qkv_TNK`.
    """
    if torch.is_grad_enabled() and qkv_TNK.requires_grad:
        parts: tuple[Tensor, Tensor, Tensor] = _FrozenSplitFunction.apply(qkv_TNK, layout, angles)  # type: ignore[no-untyped-call]
        return parts
    width = qkv_TNK.shape[-1]
    is_whole = width % (2 * LANES) == 0 and angles.cos_T1K.shape[-1] == width
    if not is_whole or not can_use_kernels(qkv_TNK, *angles):
        return _split_torch(qkv_TNK, layout, angles)[0]
    scale, eps_sum = (
        (None, 0.0) if layout.norm is None else (layout.norm.scale, layout.norm.eps_sum)
    )
    call_kernel(
        *("rotary_rows", qkv_TNK, qkv_TNK.stride(0), len(qkv_TNK), layout.num_rotated, width),
        *(scale, eps_sum, *angles),
    )
    q_THK, k_TGK, v_TGK = qkv_TNK.split(layout.sizes, dim=1)
    return q_THK, k_TGK, v_TGK


def _split_torch(
    qkv_TNK: Tensor, layout: HeadLayout, angles: RotaryAngles
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Queries, keys and values, and the norm of each head if there is a norm."""
    x_TNK, size_TN1 = qkv_TNK[:, : layout.num_rotated], None
    if layout.norm is not None:
        x_TNK, size_TN1 = layout.norm.normalize(x_TNK)
    qk_TNK = angles.apply(x_TNK)
    num_queries = layout.num_query_heads
    parts = qk_TNK[:, :num_queries], qk_TNK[:, num_queries:], qkv_TNK[:, layout.num_rotated :]
    return parts, size_TN1


class _FrozenSplitFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[FrozenRMSNorm | None],
        qkv_TNK: Tensor,
        layout: HeadLayout,
        angles: RotaryAngles,
    ) -> tuple[Tensor, ...]:
        parts, size_TN1 = _split_torch(qkv_TNK, layout, angles)
        ctx.save_for_backward(qkv_TNK if layout.norm is not None else None, size_TN1, *angles)
        ctx.state = layout.norm
        return parts

    @staticmethod
    def backward(
        ctx: FunctionContext[FrozenRMSNorm | None], dq_THK: Tensor, dk_TGK: Tensor, dv_TGK: Tensor
    ) -> tuple[Tensor, None, None]:
        norm = ctx.state
        qkv_TNK, size_TN1, *angles = ctx.saved_tensors
        dx_TNK = RotaryAngles(*angles).backward(torch.cat((dq_THK, dk_TGK), dim=1))
        if norm is not None:
            dx_TNK = norm.backward(qkv_TNK[:, : dx_TNK.shape[1]], size_TN1, dx_TNK)
        return torch.cat((dx_TNK, dv_TGK), dim=1), None, None


# --- training: gradients of the norms' weights ----------------------------------------------------


class QKRotary(NamedTuple):
    """Head counts, norms and half-width cos/sin tables of queries and keys."""

    num_query_heads: int
    num_kv_heads: int
    eps: float
    cos_T1h: Tensor
    sin_T1h: Tensor
    q_weight_K: Tensor | None
    k_weight_K: Tensor | None

    def can_use_kernel(self, qkv_TNK: Tensor) -> bool:
        """Whether the C kernels accept these tensors."""
        is_narrow = qkv_TNK.shape[-1] <= _MAX_HEAD_DIM
        return is_narrow and can_use_kernels(qkv_TNK, self.cos_T1h, self.sin_T1h)

    def kernel_args(self, qkv_TNK: Tensor) -> tuple[Tensor | float | None, ...]:
        """Leading arguments of both kernels; the caller must hold them during the call."""
        width = qkv_TNK.shape[-1]
        weights = (self.q_weight_K, self.k_weight_K)
        scales = (None if weight is None else weight * sqrt(width) for weight in weights)
        return (
            *(qkv_TNK, *scales, width * self.eps, self.cos_T1h, self.sin_T1h),
            *(len(qkv_TNK), self.num_query_heads, self.num_kv_heads, width),
        )


def split_qkv_rotary(qkv_TNK: Tensor, rotary: QKRotary) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed and rotated queries and keys, and values; differentiable."""
    weights = (rotary.q_weight_K, rotary.k_weight_K)
    if rotary.can_use_kernel(qkv_TNK):
        parts: tuple[Tensor, Tensor, Tensor] = _SplitFunction.apply(qkv_TNK, *weights, rotary)  # type: ignore[no-untyped-call]
        return parts
    sizes = [rotary.num_query_heads, rotary.num_kv_heads]
    qk_TNK, v_TGK = qkv_TNK.split([sum(sizes), rotary.num_kv_heads], dim=1)
    if rotary.q_weight_K is not None and rotary.k_weight_K is not None:
        pairs = zip((rotary.q_weight_K, rotary.k_weight_K), sizes, strict=True)
        weight_NK = torch.cat([weight_K.expand(num, -1) for weight_K, num in pairs])
        qk_TNK = rms_norm(qk_TNK, weight_NK, rotary.eps)
    q_THK, k_TGK = apply_rotary(qk_TNK, rotary.cos_T1h, rotary.sin_T1h).split(sizes, dim=1)
    return q_THK, k_TGK, v_TGK


def apply_rotary(x_TNK: Tensor, cos_T1h: Tensor, sin_T1h: Tensor) -> Tensor:
    """Rotate heads; differentiable in torch."""
    y_TNK: Tensor = _RotaryFunction.apply(x_TNK, cos_T1h, sin_T1h)  # type: ignore[no-untyped-call]
    return y_TNK


class _SplitFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[QKRotary],
        qkv_TNK: Tensor,
        q_weight_K: Tensor,
        k_weight_K: Tensor,
        rotary: QKRotary,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv_TNK)
        ctx.state = rotary
        num_tokens, _, width = qkv_TNK.shape
        q_THK = qkv_TNK.new_empty(num_tokens, rotary.num_query_heads, width)
        k_TGK = qkv_TNK.new_empty(num_tokens, rotary.num_kv_heads, width)
        call_kernel("rotary_forward", *rotary.kernel_args(qkv_TNK), q_THK, k_TGK)
        return q_THK, k_TGK, qkv_TNK[:, rotary.num_query_heads + rotary.num_kv_heads :]

    @staticmethod
    def backward(
        ctx: FunctionContext[QKRotary], dq_THK: Tensor, dk_TGK: Tensor, dv_TGK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        (qkv_TNK,) = ctx.saved_tensors
        width = qkv_TNK.shape[-1]
        dqkv_TNK, dscales_P2K = torch.empty_like(qkv_TNK), qkv_TNK.new_empty(NUM_PARTIALS, 2, width)
        grads = [grad.contiguous() for grad in (dq_THK, dk_TGK, dv_TGK)]
        call_kernel(
            "rotary_backward", *ctx.state.kernel_args(qkv_TNK), *grads, dqkv_TNK, dscales_P2K
        )
        if ctx.state.q_weight_K is None:
            return dqkv_TNK, None, None, None
        dq_weight_K, dk_weight_K = dscales_P2K.sum(0).mul_(sqrt(width))
        return dqkv_TNK, dq_weight_K, dk_weight_K, None


class _RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[Tensor, Tensor]],
        x_TNK: Tensor,
        cos_T1h: Tensor,
        sin_T1h: Tensor,
    ) -> Tensor:
        ctx.state = (cos_T1h, sin_T1h)
        return _rotate_halves(x_TNK, cos_T1h, sin_T1h, 1.0)

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[Tensor, Tensor]], dy_TNK: Tensor
    ) -> tuple[Tensor, None, None]:
        cos_T1h, sin_T1h = ctx.state
        return _rotate_halves(dy_TNK, cos_T1h, sin_T1h, -1.0), None, None


def _rotate_halves(x_TNK: Tensor, cos_T1h: Tensor, sin_T1h: Tensor, sign: float) -> Tensor:
    y_TNK = torch.empty(x_TNK.shape, dtype=x_TNK.dtype, device=x_TNK.device)
    (x1, x2), (y1, y2) = x_TNK.chunk(2, -1), y_TNK.chunk(2, -1)
    torch.mul(x1, cos_T1h, out=y1).addcmul_(x2, sin_T1h, value=-sign)
    torch.mul(x2, cos_T1h, out=y2).addcmul_(x1, sin_T1h, value=sign)
    return y_TNK
