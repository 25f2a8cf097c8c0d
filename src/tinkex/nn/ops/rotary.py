"""The angles by which positions are turned, computed once for each position.

Shape letters: T rows, P positions, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: Ways to choose angles that depend on nothing but the position.
_STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
_FIRST_POSITIONS = 512


class RotaryTable(nn.Module):
    """Stands where a module stood that computes angles from positions."""

    def __init__(self, original: nn.Module, like: Tensor) -> None:
        """`like` is a number as the model computes with."""
        super().__init__()
        self._original, self._like = original, like
        self._cos_PD = self._sin_PD = self._signed_sin_PD = like.new_empty(0, 0)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, (1, T, D) each; as transformers calls it."""
        cos_PD, sin_PD = self.cos_sin_table(int(position_ids.max()) + 1)
        at = position_ids[0]
        return cos_PD[at].unsqueeze(0), sin_PD[at].unsqueeze(0)

    def cos_sin_table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of at least so many positions, (P, D) each."""
        if num_positions > len(self._cos_PD):
            # Twice as many each time, so that all of it costs no more than the last.
            size = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            every = torch.arange(size, device=self._like.device).unsqueeze(0)
            # Not called: whoever watches the original would take this for the model's call.
            cos, sin = self._original.forward(self._like, every)
            self._cos_PD, self._sin_PD = cos[0].contiguous(), sin[0].contiguous()
            first, second = sin[0].chunk(2, dim=-1)
            self._signed_sin_PD = torch.cat((-first, second), dim=-1)
        return self._cos_PD, self._sin_PD

    def signed_cos_sin(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, (T, D); sines of a head's first half are negative."""
        self.cos_sin_table(int(positions_T.max()) + 1)
        return self._cos_PD[positions_T], self._signed_sin_PD[positions_T]


def rotary_candidates(module: nn.Module) -> list[RotaryTable]:
    """What may compute the same as a module, if it looks as though it made angles."""
    frequencies: Any = getattr(module, "inv_freq", None)
    kind = getattr(module, "rope_type", None)
    if not isinstance(frequencies, Tensor) or kind not in _STATIC_ROPE_TYPES:
        return []
    return [RotaryTable(module, frequencies.new_zeros(1, dtype=torch.float32))]
