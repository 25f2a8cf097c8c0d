"""The low-rank part of a few rows of many adapters, as sampling has them.

The pairs of adapters that run together are copied below each other, so that however many there
are, a map costs the same few matrix products: every row meets every adapter's `A`, and what is not
its own is struck out before `B`.

Shape letters: M rows, K inputs, N outputs of one member, R columns of all adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.nn.running import LowRankRows, Owner
from tinkex.nn.segments import add_product
from tinkex.nn.sites import LowRank, Site

Numbers = npt.NDArray[np.int64]

#: The most memory for copies of adapters; more adapters than fit are taken one by one.
MAX_BYTES = 512 << 20


class Adapter(Protocol):
    """An adapter to sample with."""

    @property
    def key(self) -> Hashable:
        """Equal keys mean equal weights."""
        ...

    @property
    def scale(self) -> float:
        """What the low-rank part is multiplied by."""
        ...

    @property
    def weights(self) -> Sequence[LowRank | None]:
        """The pairs by site."""
        ...


class SampledRows:
    """Rows that are sampled, so nothing is trained."""

    def is_trained(self, site: int) -> bool:
        """Nothing is."""
        return False

    def pull(self, site: int, x_MK: Tensor, dy_MN: Tensor, kept: Any, dx_MK: Tensor | None) -> None:
        """There is nothing to gather."""
        raise AssertionError("rows that are sampled have no gradient")


class Owned(NamedTuple):
    """Whose rows are whose."""

    adapters: Sequence[Adapter]
    numbers_M: Numbers
    """Each row's adapter by its index, -1 for the base model."""

    @classmethod
    def of(cls, rows: Iterable[Adapter | None]) -> Owned:
        """Rows by their adapters; of those with equal keys, the first stands for all."""
        indices: dict[Hashable, int] = {}
        adapters: list[Adapter] = []
        numbers = []
        for one in rows:
            if one is None:
                numbers.append(-1)
                continue
            number = indices.setdefault(one.key, len(adapters))
            if number == len(adapters):
                adapters.append(one)
            numbers.append(number)
        return cls(adapters, np.array(numbers, dtype=np.int64))

    def owners(self) -> tuple[Numbers, list[Owner]]:
        """The same, as experts want to know it."""
        return self.numbers_M, [Owner(one.scale, one.weights) for one in self.adapters]


class OneAdapter(SampledRows):
    """All rows are of one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self._scale = adapter.scale
        self._weights = adapter.weights

    def add(self, site: int, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add the adapter's part in place."""
        pair = self._weights[site]
        if pair is None:
            return
        if x_MK.shape[0] == 1 and y_MN.dtype == pair.down.dtype:
            self._add_to_one(pair, x_MK[0], y_MN[0])
            return
        h = x_MK.to(pair.down.dtype) @ pair.down.t()
        at, rank = 0, pair.ups[0].shape[-1]
        for index, up in enumerate(pair.ups):
            h_MR = h[:, index * rank : (index + 1) * rank]
            add_product(y_MN[:, at : at + up.shape[0]], h_MR, up.t(), self._scale)
            at += up.shape[0]

    def owners(self, num_rows: int) -> tuple[Numbers, Sequence[Owner]]:
        """All rows are the adapter's."""
        return np.zeros(num_rows, dtype=np.int64), [Owner(self._scale, self._weights)]

    def _add_to_one(self, pair: LowRank, x_K: Tensor, y_N: Tensor) -> None:
        # A matrix times a vector is the memory's work alone, and has its own, faster, way.
        h = torch.mv(pair.down, x_K)
        at, rank = 0, pair.ups[0].shape[-1]
        for index, up in enumerate(pair.ups):
            h_R = h[index * rank : (index + 1) * rank]
            y_N[at : at + up.shape[0]].addmv_(up, h_R, alpha=self._scale)
            at += up.shape[0]

    def pull(
        self, site: int, x_MK: Tensor, dy_MN: Tensor, kept: None, dx_MK: Tensor | None
    ) -> None:
        """Nothing is trained here."""
        raise AssertionError("rows that are sampled have no gradient")


class _SiteStack:
    """All adapters' pairs at one site: `A` below each other, `B^T` too, scaled."""

    def __init__(self, site: Site, device: torch.device) -> None:
        self.sizes = site.out_features
        self.is_used = False
        self._device = device
        self.downs = [torch.zeros(0, site.in_features, device=device) for _ in self.sizes]
        self.ups = [torch.zeros(0, size, device=device) for size in self.sizes]

    def reserve(self, num_columns: int) -> None:
        for tensors in (self.downs, self.ups):
            for index, old in enumerate(tensors):
                new = torch.zeros(num_columns, old.shape[1], device=self._device)
                new[: old.shape[0]] = old
                tensors[index] = new

    def write(self, at: slice, pair: LowRank | None, scale: float) -> None:
        rank = at.stop - at.start
        for index in range(len(self.sizes)):
            if pair is None:
                self.downs[index][at] = 0.0
                self.ups[index][at] = 0.0
                continue
            self.is_used = True
            self.downs[index][at] = pair.down[index * rank : (index + 1) * rank]
            torch.mul(pair.ups[index].t(), scale, out=self.ups[index][at])


class Stack:
    """Copies of the adapters that run together; those that have gone make room for others."""

    def __init__(self, sites: Sequence[Site], device: torch.device) -> None:
        self._sites = sites
        self._device = device
        self._stacks: list[_SiteStack | None] = []
        self._places: dict[Hashable, slice] = {}
        self._num_columns = 0
        self._num_reserved = 0
        per_column = sum(
            len(site.out_features) * site.in_features + sum(site.out_features)
            for site in sites
            if not site.num_experts
        )
        self._max_columns = MAX_BYTES // max(1, per_column * torch.float32.itemsize)

    def hold(self, adapters: Collection[Adapter]) -> bool:
        """Have copies of these adapters; False if they cannot be stacked."""
        new = [one for one in adapters if one.key not in self._places]
        live = sum(_rank_of(one) for one in adapters)
        num_new = sum(_rank_of(one) for one in new)
        if live > self._max_columns or not all(_is_stackable(one) for one in new):
            return False
        if new and self._num_columns + num_new > max(2 * live, 64):
            # Too much of it is of adapters that have gone.
            self.clear()
            new = list(adapters)
        for one in new:
            self._append(one)
        return True

    def clear(self) -> None:
        """Forget all copies."""
        # A new list: rows that were made of the old one may still be in use.
        self._stacks = []
        self._places = {}
        self._num_columns = self._num_reserved = 0

    def rows(self, owned: Owned) -> StackedRows:
        """The rows of adapters it holds."""
        columns = np.zeros((len(owned.numbers_M), self._num_columns), dtype=np.bool_)
        for row, number in enumerate(owned.numbers_M.tolist()):
            if number >= 0:
                columns[row, self._places[owned.adapters[number].key]] = True
        hidden_MR = torch.from_numpy(~columns).to(self._device)
        return StackedRows(self._stacks, hidden_MR, owned)

    def _append(self, adapter: Adapter) -> None:
        at = slice(self._num_columns, self._num_columns + _rank_of(adapter))
        if not self._stacks:
            # Experts take rows apart themselves.
            self._stacks = [
                None if site.num_experts else _SiteStack(site, self._device) for site in self._sites
            ]
        if at.stop > self._num_reserved:
            self._num_reserved = max(at.stop, min(2 * self._num_reserved, self._max_columns))
            for reserved in filter(None, self._stacks):
                reserved.reserve(self._num_reserved)
        for stack, pair in zip(self._stacks, adapter.weights, strict=True):
            if stack is not None:
                stack.write(at, pair, adapter.scale)
        self._places[adapter.key] = at
        self._num_columns = at.stop


class StackedRows(SampledRows):
    """Rows of several adapters, in any order."""

    def __init__(
        self, stacks: Sequence[_SiteStack | None], hidden_MR: Tensor, owned: Owned
    ) -> None:
        self._stacks = stacks
        self._hidden_MR = hidden_MR
        self._owned = owned

    def owners(self, num_rows: int) -> tuple[Numbers, Sequence[Owner]]:
        """Whose rows they are."""
        return self._owned.owners()

    def add(self, site: int, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add every row's own adapter's part in place."""
        stack = self._stacks[site]
        if stack is None or not stack.is_used:
            return
        num, at = self._hidden_MR.shape[1], 0
        x_MK = x_MK.float()
        for down, up, size in zip(stack.downs, stack.ups, stack.sizes, strict=True):
            h_MR = x_MK @ down[:num].t()
            # Struck out, not multiplied by zero: another tenant's infinity must not come through.
            h_MR.masked_fill_(self._hidden_MR, 0.0)
            add_product(y_MN[:, at : at + size], h_MR, up[:num], 1.0)
            at += size


class ScatteredRows(SampledRows):
    """Rows of adapters that are too many or too odd to be stacked, adapter by adapter."""

    def __init__(self, owned: Owned) -> None:
        self._owned = owned
        self._parts = [
            (torch.from_numpy(np.flatnonzero(owned.numbers_M == number)), OneAdapter(one))
            for number, one in enumerate(owned.adapters)
        ]

    def owners(self, num_rows: int) -> tuple[Numbers, Sequence[Owner]]:
        """Whose rows they are."""
        return self._owned.owners()

    def add(self, site: int, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add every row's own adapter's part in place."""
        for rows, adapter in self._parts:
            at = rows.to(x_MK.device)
            y = y_MN[at]
            adapter.add(site, x_MK[at], y)
            y_MN[at] = y


class SplitRows(SampledRows):
    """The first rows are one thing, the others another."""

    def __init__(self, at: int, first: LowRankRows, second: LowRankRows) -> None:
        self._at = at
        self._first, self._second = first, second

    def owners(self, num_rows: int) -> tuple[Numbers, Sequence[Owner]]:
        """Whose rows they are."""
        first_M, first = self._first.owners(self._at)
        second_M, second = self._second.owners(num_rows - self._at)
        second_M = np.where(second_M < 0, -1, second_M + len(first))
        return np.concatenate([first_M, second_M]), [*first, *second]

    def add(self, site: int, x_MK: Tensor, y_MN: Tensor) -> None:
        """Add to both."""
        self._first.add(site, x_MK[: self._at], y_MN[: self._at])
        self._second.add(site, x_MK[self._at :], y_MN[self._at :])

    def pull(
        self, site: int, x_MK: Tensor, dy_MN: Tensor, kept: None, dx_MK: Tensor | None
    ) -> None:
        """Nothing is trained here."""
        raise AssertionError("rows that are sampled have no gradient")


def _rank_of(adapter: Adapter) -> int:
    for pair in adapter.weights:
        if pair is not None and pair.down.ndim == 2:
            return int(pair.ups[0].shape[-1])
    return 0


def _is_stackable(adapter: Adapter) -> bool:
    """Whether its numbers can stand beside others': zero times what is not finite is no zero."""
    tensors = [
        tensor
        for pair in adapter.weights
        if pair is not None and pair.down.ndim == 2
        for tensor in (pair.down, *pair.ups)
    ]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
