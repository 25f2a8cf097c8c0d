"""Attention with rotated positions: one product for q, k and v; q and k are turned together.

A head's two halves are the parts of complex numbers, which are turned by each row's angles.

Shape letters: T rows, N all heads, H query heads, G key heads, A heads that are turned (H + G),
D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinkex.nn.linear import GroupMember, LinearGroup
from tinkex.nn.native import rows
from tinkex.nn.native.library import LANES
from tinkex.nn.norms import RmsNorm
from tinkex.nn.running import Options, current_run


class _Turn(NamedTuple):
    """The angles of a pass."""

    cos_T1D: Tensor
    sin_T1D: Tensor
    """Negative for a head's first half."""

    def run(self, x_TAD: Tensor) -> Tensor:
        half = x_TAD.shape[-1] // 2
        return (x_TAD * self.cos_T1D).addcmul_(x_TAD.roll(half, -1), self.sin_T1D)

    def pull(self, dy_TAD: Tensor) -> Tensor:
        half = dy_TAD.shape[-1] // 2
        return (dy_TAD * self.sin_T1D).roll(half, -1).addcmul_(dy_TAD, self.cos_T1D)


def _turn(kept: dict[object, Any], embeddings: tuple[Tensor, Tensor]) -> _Turn:
    """The angles, read once for all layers that are given the same."""
    cos, sin = embeddings
    found = kept.get(_Turn)
    if found is None or found[0] is not cos:
        first, second = sin[0].unsqueeze(1).chunk(2, dim=-1)
        found = cos, _Turn(cos[0].unsqueeze(1), torch.cat((-first, second), dim=-1))
        kept[_Turn] = found
    turn: _Turn = found[1]
    return turn


class Heads(NamedTuple):
    """How many heads there are of each kind, and what is done to them before they are turned."""

    num_queries: int
    num_keys: int
    norm: RmsNorm | None

    @property
    def sizes(self) -> list[int]:
        return [self.num_queries, self.num_keys, self.num_keys]


class Attending(nn.Module):
    """Stands where a module of attention stood."""

    def __init__(self, into: LinearGroup, out: LinearGroup, like: nn.Module, how: Options) -> None:
        super().__init__()
        self.into, self.out, self.how = into, out, how
        self.width = int(like.head_dim)  # type: ignore[arg-type]
        self.layer_idx = int(like.layer_idx)  # type: ignore[arg-type]
        num_queries = out.in_features // self.width
        num_keys = (sum(into.sizes) // self.width - num_queries) // 2
        self.heads = Heads(num_queries, num_keys, _joined_norm(like, num_queries, num_keys))

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        """As transformers calls it: (1, T, width) in and out."""
        run = current_run()
        y_T = self.into.outputs(hidden_states[0])
        y_TND = y_T.view(y_T.shape[0], -1, self.width)
        turn = _turn(run.kept, position_embeddings)
        if torch.is_grad_enabled() and y_TND.requires_grad:
            parts = _Turned.apply(y_TND, self.heads, turn)  # type: ignore[no-untyped-call]
        else:
            parts = _split_in_place(y_TND, self.heads, turn)
        q_HTD, k_GTD, v_GTD = (part.transpose(0, 1) for part in parts)
        out_THD = run.this.attention.attend(self.layer_idx, q_HTD, k_GTD, v_GTD, self.how)
        return self.out.outputs(out_THD.flatten(1)).unsqueeze(0), None


def _split(
    y_TND: Tensor, heads: Heads, turn: _Turn
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Turned queries and keys, and values; and the size of each head if it was normed."""
    num_turned = heads.num_queries + heads.num_keys
    x_TAD, size_TA1 = y_TND[:, :num_turned], None
    if heads.norm is not None:
        x_TAD, size_TA1 = heads.norm.normed(x_TAD)
    qk_TAD = turn.run(x_TAD)
    parts = qk_TAD[:, : heads.num_queries], qk_TAD[:, heads.num_queries :], y_TND[:, num_turned:]
    return parts, size_TA1


def _split_in_place(y_TND: Tensor, heads: Heads, turn: _Turn) -> tuple[Tensor, Tensor, Tensor]:
    """The same where nothing is differentiated; the input is used up."""
    width = y_TND.shape[-1]
    is_whole = width % (2 * LANES) == 0 and turn.cos_T1D.shape[-1] == width
    if not is_whole or not rows.are_suited(y_TND, *turn):
        return _split(y_TND, heads, turn)[0]
    num_turned = heads.num_queries + heads.num_keys
    norm = None if heads.norm is None else (heads.norm.scale, heads.norm.floor)
    rows.turn(y_TND, num_turned, norm, (turn.cos_T1D, turn.sin_T1D))
    q_THD, k_TGD, v_TGD = y_TND.split(heads.sizes, dim=1)
    return q_THD, k_TGD, v_TGD


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TND: Tensor, heads: Heads, turn: _Turn) -> tuple[Tensor, ...]:
        parts, size_TA1 = _split(y_TND, heads, turn)
        ctx.save_for_backward(y_TND if heads.norm is not None else None, size_TA1, *turn)
        ctx.heads = heads
        return parts

    @staticmethod
    def backward(
        ctx: Any, dq_THD: Tensor, dk_TGD: Tensor, dv_TGD: Tensor
    ) -> tuple[Tensor, None, None]:
        y_TND, size_TA1, *turn = ctx.saved_tensors
        dx_TAD = _Turn(*turn).pull(torch.cat((dq_THD, dk_TGD), dim=1))
        if y_TND is not None:
            x_TAD = y_TND[:, : dx_TAD.shape[1]]
            dx_TAD = ctx.heads.norm.pull(x_TAD, size_TA1, dx_TAD)
        return torch.cat((dx_TAD, dv_TGD), dim=1), None, None


def _joined_norm(like: nn.Module, num_queries: int, num_keys: int) -> RmsNorm | None:
    q_norm, k_norm = getattr(like, "q_norm", None), getattr(like, "k_norm", None)
    if not isinstance(q_norm, RmsNorm) or not isinstance(k_norm, RmsNorm):
        return None
    weights = q_norm.weight.expand(num_queries, -1), k_norm.weight.expand(num_keys, -1)
    return RmsNorm(torch.cat(weights), q_norm.eps)


def attention_twins(module: nn.Module, how: Options) -> list[Attending]:
    """What may compute the same as a module, if it looks like attention with turned positions."""
    children = dict(module.named_children())
    out = children.pop("o_proj", None)
    maps = [child for child in children.values() if isinstance(child, GroupMember)]
    if not isinstance(out, GroupMember) or not maps or not hasattr(module, "head_dim"):
        return []
    into = maps[0].group
    is_plain = all(one.group is into for one in maps) and len(into.sizes) == len(maps)
    norms = [norm for norm in children.values() if isinstance(norm, RmsNorm)]
    has_odd_norm = any(norm.weight.shape[-1] != module.head_dim for norm in norms)
    if not is_plain or has_odd_norm or len({norm.eps for norm in norms}) > 1:
        return []
    return [Attending(into, out.group, module, how)]
