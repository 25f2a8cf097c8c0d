"""Faster modules that stand in for a model's own, each only where it was seen to say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tinkex.nn.angles import angle_twins
from tinkex.nn.attending import attention_twins
from tinkex.nn.gated import mlp_twins
from tinkex.nn.norms import norm_twins
from tinkex.nn.running import Options
from tinkex.nn.survey import Child

Twins: TypeAlias = Callable[[nn.Module], Sequence[nn.Module]]
#: How far a twin may be from the original, as a part of the largest number.
_TOLERANCE = 5e-6
_COARSE_TOLERANCE = 2e-2


class _Pair(NamedTuple):
    child: Child
    twin: nn.Module


def replace_small(found: Iterable[Child], run: Callable[[], object]) -> None:
    """Replace norms, and what makes angles of positions; `run` runs the model."""
    _replace(found, lambda module: norm_twins(module) or angle_twins(module), run)


def replace_blocks(
    found: Iterable[Child], how: Mapping[int, Options], run: Callable[[], object]
) -> None:
    """Replace MLPs and attention, whose way to attend is known by layer."""

    def twins_of(module: nn.Module) -> Sequence[nn.Module]:
        layer = getattr(module, "layer_idx", None)
        seen = how.get(layer) if isinstance(layer, int) else None
        return mlp_twins(module) if seen is None else attention_twins(module, seen)

    _replace(found, twins_of, run)


def _replace(found: Iterable[Child], twins_of: Twins, run: Callable[[], object]) -> None:
    proven: list[_Pair] = []
    with ExitStack() as stack:
        for child in found:
            if twins := twins_of(child.module):
                watch = _watch(child, twins, proven)
                hook = child.module.register_forward_hook(watch, with_kwargs=True)
                stack.callback(hook.remove)
        run()
    for child, twin in proven:
        setattr(child.parent, child.name, twin)


def _watch(
    child: Child, twins: Sequence[nn.Module], proven: list[_Pair]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
    def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> None:
        for twin in twins:
            if _is_same(twin, args, kwargs, _first(answer)):
                proven.append(_Pair(child, twin))
                return

    return compare


def _is_same(
    twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Tensor
) -> bool:
    try:
        found = _first(twin(*args, **kwargs))
    except (RuntimeError, TypeError):
        # It is called otherwise or has other shapes, so it is something else.
        return False
    tolerance = _TOLERANCE if expected.dtype == torch.float32 else _COARSE_TOLERANCE
    off = (found - expected).abs().max() <= tolerance * expected.abs().max()
    is_alike = found.shape == expected.shape and found.dtype == expected.dtype
    return is_alike and bool(off)


def _first(answer: Any) -> Tensor:
    tensor = answer[0] if isinstance(answer, tuple) else answer
    assert isinstance(tensor, Tensor)
    return tensor
