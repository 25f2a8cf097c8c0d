"""KV cache: per-prompt storage and slotted blocks for running sequences.

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
    """Shape of one layer's keys and values of a token."""

    num_heads: int
    key_width: int
    value_width: int


class KVCacheSpec(NamedTuple):
    """Shapes of all layers, dtype and device of a KV cache."""

    layers: Sequence[KVShape]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        num_elements = sum(one.num_heads * (one.key_width + one.value_width) for one in self.layers)
        return num_elements * self.dtype.itemsize

    def allocate(self, *shape: int) -> Tensor:
        """Allocate uninitialized memory."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def allocate_prompt(self, num_tokens: int) -> PromptKV:
        """Allocate the keys and values of one prompt."""
        return PromptKV(self, num_tokens)


class PromptKV:
    """Keys and values of one prompt, by layer: (G, L, D)."""

    def __init__(self, spec: KVCacheSpec, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_bytes = num_tokens * spec.token_bytes
        self.last_hidden_1D: Tensor | None = None
        """The last token's hidden state, set when the prefill is complete."""
        self.keys = [spec.allocate(s.num_heads, num_tokens, s.key_width) for s in spec.layers]
        self.values = [spec.allocate(s.num_heads, num_tokens, s.value_width) for s in spec.layers]

    def copy_prefix(self, other: PromptKV, num_tokens: int) -> None:
        """Copy the first tokens from another prompt."""
        mine, theirs = self.keys + self.values, other.keys + other.values
        for target, source in zip(mine, theirs, strict=True):
            target[:, :num_tokens] = source[:, :num_tokens]


class KVBlock:
    """Keys and values of sequences of up to C tokens each, by layer: (N, G, C, D).

    Positions after a sequence's tokens are zero: stale values would be masked with weight zero, but
    zero times infinity or NaN is NaN.
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
        """Allocated bytes."""
        return self.num_slots * self.capacity * self._spec.token_bytes

    @property
    def addresses(self) -> npt.NDArray[np.int64]:
        """Addresses of each layer's keys (row 0) and values (row 1)."""
        if self._addresses is None:
            rows = [[one.data_ptr() for one in tensors] for tensors in (self.keys, self.values)]
            self._addresses = np.array(rows, dtype=np.int64)
        return self._addresses

    def resize(self, num_slots: int, num_preserved: int) -> None:
        """Change the number of slots, preserving the first `num_preserved`."""
        for tensors in (self.keys, self.values):
            # Layer by layer: at most one layer is allocated twice at any time.
            for index, old in enumerate(tensors):
                new = self._allocate_layer(num_slots, old.shape[1], old.shape[3])
                new[:num_preserved] = old[:num_preserved]
                tensors[index] = new
        self.num_slots = num_slots
        self._addresses = None

    def load_prompt(self, slot: int, prompt: PromptKV, num_tokens: int) -> None:
        """Copy a prompt's tokens to a slot and clear the rest of it."""
        for mine, theirs in self._paired_with(prompt.keys, prompt.values):
            mine[slot, :, :num_tokens] = theirs[:, :num_tokens]
            mine[slot, :, num_tokens:] = 0.0

    def copy_slot(self, slot: int, other: KVBlock, from_slot: int) -> None:
        """Copy a slot of another block, or of this one, to a slot."""
        size = min(self.capacity, other.capacity)
        for mine, theirs in self._paired_with(other.keys, other.values):
            mine[slot, :, :size] = theirs[from_slot, :, :size]
            mine[slot, :, size:] = 0.0

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
