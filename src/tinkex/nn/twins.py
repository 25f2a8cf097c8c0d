"""Faster modules that stand in for a model's own, each only where it was seen to say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tinkex.nn.angles import rotary_candidates
from tinkex.nn.attending import attention_candidates
from tinkex.nn.gated import mlp_candidates
from tinkex.nn.norms import rms_norm_candidates
from tinkex.nn.running import AttentionOptions
from tinkex.nn.survey import NamedChild

CandidateFactory: TypeAlias = Callable[[nn.Module], Sequence[nn.Module]]
#: How far a twin may be from the original, as a part of the largest number.
_OUTPUT_TOLERANCE = 5e-6
_OUTPUT_TOLERANCE_16BIT = 2e-2


class _Replacement(NamedTuple):
    child: NamedChild
    candidate: nn.Module


def swap_modules(found: Iterable[NamedChild], run: Callable[[], object]) -> None:
    """Replace norms, and what makes angles of positions; `run` runs the model."""
    _swap_equivalent(
        found, lambda module: rms_norm_candidates(module) or rotary_candidates(module), run
    )


def swap_blocks(
    found: Iterable[NamedChild],
    options_by_layer: Mapping[int, AttentionOptions],
    run: Callable[[], object],
) -> None:
    """Replace MLPs and attention, whose way to attend is known by layer."""

    def twins_of(module: nn.Module) -> Sequence[nn.Module]:
        layer = getattr(module, "layer_idx", None)
        seen = options_by_layer.get(layer) if isinstance(layer, int) else None
        return mlp_candidates(module) if seen is None else attention_candidates(module, seen)

    _swap_equivalent(found, twins_of, run)


def _swap_equivalent(
    found: Iterable[NamedChild], candidates_of: CandidateFactory, run: Callable[[], object]
) -> None:
    proven: list[_Replacement] = []
    with ExitStack() as stack:
        for child in found:
            if twins := candidates_of(child.module):
                watch = _compare_hook(child, twins, proven)
                hook = child.module.register_forward_hook(watch, with_kwargs=True)
                stack.callback(hook.remove)
        run()
    for child, twin in proven:
        setattr(child.parent, child.name, twin)


def _compare_hook(
    child: NamedChild, candidates: Sequence[nn.Module], accepted: list[_Replacement]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
    def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> None:
        for twin in candidates:
            if _is_equivalent(twin, args, kwargs, _first_output(answer)):
                accepted.append(_Replacement(child, twin))
                return

    return compare


def _is_equivalent(
    candidate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Tensor
) -> bool:
    try:
        found = _first_output(candidate(*args, **kwargs))
    except (RuntimeError, TypeError):
        # It is called otherwise or has other shapes, so it is something else.
        return False
    tolerance = _OUTPUT_TOLERANCE if expected.dtype == torch.float32 else _OUTPUT_TOLERANCE_16BIT
    off = (found - expected).abs().max() <= tolerance * expected.abs().max()
    is_alike = found.shape == expected.shape and found.dtype == expected.dtype
    return is_alike and bool(off)


def _first_output(answer: Any) -> Tensor:
    tensor = answer[0] if isinstance(answer, tuple) else answer
    assert isinstance(tensor, Tensor)
    return tensor
