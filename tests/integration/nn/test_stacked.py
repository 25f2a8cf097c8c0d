"""Rows of many adapters at once equal each adapter on its own rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tinkex.nn.segments import Segment, Segments
from tinkex.nn.sites import LowRank, Part, Site
from tinkex.nn.stacked import OneAdapter, Owned, ScatteredRows, SplitRows, Stack

SITES = [
    Site(part=Part.ATTENTION, paths=("q", "k"), in_features=6, out_features=(8, 4)),
    Site(part=Part.MLP, paths=("up",), in_features=6, out_features=(5,)),
]


@dataclass(frozen=True, eq=False)
class _Adapter:
    key: Any
    scale: float
    weights: list[LowRank | None] = field(repr=False)


def _adapter(key: int, rank: int, has_mlp: bool = True) -> _Adapter:
    dice = torch.Generator().manual_seed(key)

    def pair(site: Site) -> LowRank:
        down = torch.randn(len(site.paths) * rank, site.in_features, generator=dice)
        ups = [torch.randn(size, rank, generator=dice) for size in site.out_features]
        return LowRank(down, tuple(ups))

    return _Adapter(key, 0.5 + key, [pair(SITES[0]), pair(SITES[1]) if has_mlp else None])


ONE, TWO, THREE = _adapter(1, 2), _adapter(2, 3, has_mlp=False), _adapter(3, 1)
ROWS = [ONE, None, TWO, ONE, THREE, None, TWO]


def _wanted(rows: list[_Adapter | None], site: int, x: Tensor, y: Tensor) -> Tensor:
    out = y.clone()
    segments = [
        Segment(index, index + 1, one.scale, one.weights)
        for index, one in enumerate(rows)
        if one is not None
    ]
    Segments(segments).add(site, x, out)
    return out


def _inputs(num: int, site: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(num)
    x = torch.randn(num, SITES[site].in_features, generator=dice)
    return x, torch.randn(num, sum(SITES[site].out_features), generator=dice)


def _check(rows: Any, owners: list[_Adapter | None]) -> None:
    for site in range(len(SITES)):
        x, y = _inputs(len(owners), site)
        out = y.clone()
        rows.add(site, x, out)
        assert torch.allclose(out, _wanted(owners, site, x, y), atol=1e-4)
    numbers, kinds = rows.owners(len(owners))
    found = [kinds[number].weights if number >= 0 else None for number in numbers.tolist()]
    assert found == [one.weights if one is not None else None for one in owners]


def test_stacked_rows_get_their_own_adapter() -> None:
    stack = Stack(SITES, torch.device("cpu"))
    owned = Owned.of(ROWS)
    assert stack.hold(owned.adapters)
    _check(stack.rows(owned), ROWS)


def test_adapters_come_and_go_and_rows_stay_right() -> None:
    stack = Stack(SITES, torch.device("cpu"))
    others = [_adapter(10 + number, 1 + number % 4) for number in range(60)]
    for number in range(0, 60, 2):
        rows = [others[number], None, others[number + 1], ONE]
        owned = Owned.of(rows)
        assert stack.hold(owned.adapters)
        _check(stack.rows(owned), rows)
    assert stack._num_columns < 80, "those that have gone make room"


@pytest.mark.parametrize("num", [1, 4])
def test_rows_of_one_adapter(num: int) -> None:
    _check(OneAdapter(ONE), [ONE] * num)


def test_scattered_rows_get_their_own_adapter() -> None:
    _check(ScatteredRows(Owned.of(ROWS)), ROWS)


def test_split_rows_are_two_kinds() -> None:
    stack = Stack(SITES, torch.device("cpu"))
    owned = Owned.of(ROWS[:4])
    assert stack.hold(owned.adapters)
    second = Segments([Segment(0, 1, THREE.scale, THREE.weights)])
    _check(SplitRows(4, stack.rows(owned), second), [*ROWS[:4], THREE, None])


def test_weights_that_are_not_finite_are_not_stacked() -> None:
    bad = _adapter(4, 2)
    pair = bad.weights[0]
    assert pair is not None
    pair.ups[1][0, 0] = float("inf")
    assert not Stack(SITES, torch.device("cpu")).hold([ONE, bad])


def test_too_many_adapters_are_not_stacked() -> None:
    stack = Stack(SITES, torch.device("cpu"))
    stack._max_columns = 4
    assert not stack.hold([ONE, TWO])
    assert stack.hold([ONE])


def test_nothing_is_trained() -> None:
    rows = OneAdapter(ONE)
    assert not rows.is_trained(0)
    with pytest.raises(AssertionError, match="no gradient"):
        rows.pull(0, torch.zeros(1, 6), torch.zeros(1, 12), None, None)
