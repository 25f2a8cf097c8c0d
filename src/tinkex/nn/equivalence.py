"""Proves that a hosted model says what the model said before it was taken in.

Shape letters: T rows, V vocabulary, M rows, K inputs, N outputs, H query heads, G key heads, D head
width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinkex.nn.forward_context import AttentionOptions, BoundAdapter, ForwardContext
from tinkex.nn.fused_layers import attention_candidates, mlp_candidates
from tinkex.nn.lm_head import LMHead, find_lm_head
from tinkex.nn.lora_layout import LoraTarget
from tinkex.nn.module_discovery import NamedChild, unsupported_model_error
from tinkex.nn.moe_experts import TARGETS_PER_EXPERTS
from tinkex.nn.ops.rms_norm import rms_norm_candidates
from tinkex.nn.ops.rotary import rotary_candidates
from tinkex.nn.packed_attention import PackedAttention

CHECK_LENGTHS = (5, 9)
#: How far a hosted model's log-probabilities may be from the model's own.
_LOGPROB_TOLERANCE = 1e-3
#: The same for 16-bit numbers.
_LOGPROB_TOLERANCE_16BIT = 0.1
#: What a model's own code raises if it cannot do without what it is not given here.
_FAILURES = (TypeError, AttributeError, ValueError, RuntimeError, LookupError)


class PackableModel(Protocol):
    """A model that was taken in."""

    lm_head: LMHead
    lora_targets: list[LoraTarget]

    def hidden_states(
        self, tokens_T: Tensor, positions_T: Tensor, context: ForwardContext
    ) -> Tensor:
        """The last hidden states of packed rows, (T, D)."""
        ...


class _RecordingLora:
    """Rows of the base model alone; notes how many came to each site."""

    def __init__(self) -> None:
        self._row_counts: Counter[tuple[int, int]] = Counter()
        self._routed_rows: list[int] = []

    def has_seen_all_once(self, targets: Sequence[LoraTarget], num_rows: int) -> bool:
        """Whether every map and every module of experts was given all rows, once."""
        maps = [number for number, site in enumerate(targets) if not site.num_experts]
        num_modules = (len(targets) - len(maps)) // TARGETS_PER_EXPERTS
        is_mapped = self._row_counts == Counter({(number, num_rows): 1 for number in maps})
        return is_mapped and self._routed_rows == [num_rows] * num_modules

    def is_trained(self, target_index: int) -> bool:
        return False

    def add(self, target_index: int, x_MK: Tensor, y_MN: Tensor) -> None:
        self._row_counts[target_index, x_MK.shape[0]] += 1

    def backward(
        self, target_index: int, x_MK: Tensor, dy_MN: Tensor, saved: Any, dx_MK: Tensor | None
    ) -> None:
        raise AssertionError("a trial is not differentiated")

    def adapters_by_row(
        self, num_rows: int
    ) -> tuple[npt.NDArray[np.int64], Sequence[BoundAdapter]]:
        self._routed_rows.append(num_rows)
        return np.full(num_rows, -1, dtype=np.int64), []


class _RecordingAttention:
    """Packed attention that notes how each layer attends."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, AttentionOptions]] = []
        self._attention = PackedAttention(CHECK_LENGTHS)

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.calls.append((layer, options))
        return self._attention.attend(layer, q_HTD, k_GTD, v_GTD, options)


class PackedRun(NamedTuple):
    """What was seen of a model that ran packed."""

    logits_TV: Tensor
    lora: _RecordingLora
    attention_calls: Sequence[tuple[int, AttentionOptions]]
    """The layers that attended, in order, and how."""


class EquivalenceCheck:
    """A few tokens that a model reads before and after it is taken in."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config: Any = model.get_decoder().config
        head = find_lm_head(model)
        dice = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, head.out_features, (sum(CHECK_LENGTHS),), generator=dice)
        self._tokens_T = tokens.to(head.weight.device)
        parts = [
            model(input_ids=part.unsqueeze(0), use_cache=False).logits[0]
            for part in self._tokens_T.split(CHECK_LENGTHS)
        ]
        self._expected_TV = torch.cat(parts).float().log_softmax(-1)

    @torch.no_grad()
    def run_packed(self, hosted: PackableModel) -> PackedRun:
        """Run the model packed, and see what it says and who attends how."""
        device = self._tokens_T.device
        positions_T = torch.cat([torch.arange(length, device=device) for length in CHECK_LENGTHS])
        rows, sight = _RecordingLora(), _RecordingAttention()
        try:
            hidden_TD = hosted.hidden_states(
                self._tokens_T, positions_T, ForwardContext(rows, sight)
            )
        except _FAILURES as error:
            raise unsupported_model_error(
                self._model, f"packed, it does not run: {error}"
            ) from error
        logits_TV, _ = hosted.lm_head.logits(hidden_TD, rows)
        return PackedRun(logits_TV, rows, sight.calls)

    def check(self, hosted: PackableModel) -> dict[int, AttentionOptions]:
        """Refuse a model that, packed, says something else; returns how each layer attends."""
        found = self.run_packed(hosted)
        self._check_attention(found.attention_calls)
        if not found.lora.has_seen_all_once(hosted.lora_targets, sum(CHECK_LENGTHS)):
            raise unsupported_model_error(
                self._model, "its linear maps are not given every token once"
            )
        is_fine = found.logits_TV.dtype == torch.float32
        off = (found.logits_TV.float().log_softmax(-1) - self._expected_TV).abs().max().item()
        if not off <= (_LOGPROB_TOLERANCE if is_fine else _LOGPROB_TOLERANCE_16BIT):
            raise unsupported_model_error(
                self._model, f"packed, its log-probabilities are off by {off:.2g}"
            )
        return dict(found.attention_calls)

    def _check_attention(self, calls: Sequence[tuple[int, AttentionOptions]]) -> None:
        """A window is longer than a trial, so that only what was asked for can be looked at."""
        layers = range(self._config.num_hidden_layers)
        if sorted(layer for layer, _ in calls) != list(layers):
            raise unsupported_model_error(self._model, "not every layer attends once")
        window = getattr(self._config, "sliding_window", None)
        if window is None or window >= self._config.max_position_embeddings:
            return
        kinds = getattr(self._config, "layer_types", None) or ["sliding_attention" for _ in layers]
        for layer, how in calls:
            expected = window if kinds[layer] == "sliding_attention" else None
            if how.window != expected:
                raise unsupported_model_error(
                    self._model,
                    f"layer {layer} attends with a window of {how.window}, where its config says "
                    f"{expected}",
                )


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
