"""Keys and values that are kept of earlier tokens: of prompts, and of samples slot by slot.

Shape letters: N slots, G key heads, C capacity in tokens, L tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class KVShape(NamedTuple):
    """What one layer keeps of a token."""

    num_heads: int
    key_width: int
    value_width: int


class KVCacheSpec(NamedTuple):
    """What all layers keep of a token, and as what numbers."""

    layers: Sequence[KVShape]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """How much is kept of one token."""
        numbers = sum(one.num_heads * (one.key_width + one.value_width) for one in self.layers)
        return numbers * self.dtype.itemsize

    def allocate(self, *shape: int) -> Tensor:
        """Memory that is to be written before it is read."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


class PromptKV:
    """Keys and values of one prompt, by layer: (G, L, D)."""

    def __init__(self, spec: KVCacheSpec, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_bytes = num_tokens * spec.token_bytes
        self.last_hidden_1D: Tensor | None = None
        """The last token's hidden state, once all are filled in."""
        self.keys = [spec.allocate(s.num_heads, num_tokens, s.key_width) for s in spec.layers]
        self.values = [spec.allocate(s.num_heads, num_tokens, s.value_width) for s in spec.layers]

    def copy_prefix(self, other: PromptKV, num_tokens: int) -> None:
        """Begin as another prompt does."""
        mine, theirs = self.keys + self.values, other.keys + other.values
        for target, source in zip(mine, theirs, strict=True):
            target[:, :num_tokens] = source[:, :num_tokens]


class KVBlock:
    """Keys and values of samples of at most C tokens each, by layer: (N, G, C, D).

    What a slot holds beyond its sample's tokens is zero, never what was there before: a number
    that is hidden by a weight of zero still spoils a sum if it is not finite.
    """

    def __init__(self, spec: KVCacheSpec, num_slots: int, capacity: int) -> None:
        self._spec = spec
        self._addresses: npt.NDArray[np.int64] | None = None
        self.capacity = capacity
        self.num_slots = 0
        self.keys: list[Tensor] = [
            self._allocate_layer(0, s.num_heads, s.key_width) for s in spec.layers
        ]
        self.values: list[Tensor] = [
            self._allocate_layer(0, s.num_heads, s.value_width) for s in spec.layers
        ]
        self.resize(num_slots, 0)

    @property
    def num_bytes(self) -> int:
        """How much memory it takes."""
        return self.num_slots * self.capacity * self._spec.token_bytes

    @property
    def addresses(self) -> npt.NDArray[np.int64]:
        """Where the keys of each layer lie, and below them the values."""
        if self._addresses is None:
            at = [[one.data_ptr() for one in tensors] for tensors in (self.keys, self.values)]
            self._addresses = np.array(at, dtype=np.int64)
        return self._addresses

    def resize(self, num_slots: int, num_preserved: int) -> None:
        """Have more or fewer slots; the first few keep what they hold."""
        for tensors in (self.keys, self.values):
            # Layer by layer, so that never more than one layer is there twice.
            for index, old in enumerate(tensors):
                new = self._allocate_layer(num_slots, old.shape[1], old.shape[3])
                new[:num_preserved] = old[:num_preserved]
                tensors[index] = new
        self.num_slots = num_slots
        self._addresses = None

    def load_prompt(self, slot: int, prompt: PromptKV, num_tokens: int) -> None:
        """Let a slot begin with a prompt."""
        for mine, theirs in self._paired_with(prompt.keys, prompt.values):
            mine[slot, :, :num_tokens] = theirs[:, :num_tokens]
            mine[slot, :, num_tokens:] = 0.0

    def copy_slot(self, slot: int, other: KVBlock, from_slot: int) -> None:
        """Let a slot hold what a slot of another block holds, or of this one."""
        size = min(self.capacity, other.capacity)
        for mine, theirs in self._paired_with(other.keys, other.values):
            mine[slot, :, :size] = theirs[from_slot, :, :size]
            mine[slot, :, size:] = 0.0

    def clear_slot(self, slot: int) -> None:
        """Let a slot hold nothing."""
        for mine in (*self.keys, *self.values):
            mine[slot] = 0.0

    def _paired_with(
        self, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.keys, keys, strict=True)
        yield from zip(self.values, values, strict=True)

    def _allocate_layer(self, num_slots: int, num_heads: int, width: int) -> Tensor:
        return torch.zeros(
            num_slots,
            num_heads,
            self.capacity,
            width,
            dtype=self._spec.dtype,
            device=self._spec.device,
        )
