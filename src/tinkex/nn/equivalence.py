"""Check that a hosted model matches the original, and swap in fused modules that match.

Shape letters: T rows, V vocabulary, M rows, K inputs, N outputs, H query heads, G key heads, D head
width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tinkex.nn.forward_context import (
    AttentionOptions,
    BoundAdapter,
    ForwardContext,
    SavedLora,
)
from tinkex.nn.fused_layers import attention_candidates, mlp_candidates
from tinkex.nn.lm_head import LMHead, find_lm_head
from tinkex.nn.lora_layout import LoraTarget
from tinkex.nn.module_discovery import NamedChild, unsupported_model_error
from tinkex.nn.moe_experts import TARGETS_PER_EXPERTS
from tinkex.nn.ops.rms_norm import rms_norm_candidates
from tinkex.nn.ops.rotary import rotary_candidates
from tinkex.nn.packed_attention import PackedAttention

CHECK_LENGTHS = (5, 9)
#: Maximum difference of log-probabilities between a hosted model and the original.
_LOGPROB_TOLERANCE = 1e-3
#: The same for 16-bit dtypes.
_LOGPROB_TOLERANCE_16BIT = 0.1
#: Errors of model code that needs arguments which packed passes do not provide.
_FAILURES = (TypeError, AttributeError, ValueError, RuntimeError, LookupError)


class PackableModel(Protocol):
    """A hosted model."""

    lm_head: LMHead
    lora_targets: list[LoraTarget]

    def hidden_states(
        self, tokens_T: Tensor, positions_T: Tensor, context: ForwardContext
    ) -> Tensor:
        """Return the last hidden states of packed rows, (T, D)."""
        ...


class _RecordingLora:
    """No adapters; records how many rows each target was given."""

    def __init__(self) -> None:
        self._row_counts: Counter[tuple[int, int]] = Counter()
        self._routed_rows: list[int] = []

    def has_seen_all_once(self, targets: Sequence[LoraTarget], num_rows: int) -> bool:
        """Whether every linear layer and experts module was given all rows, once."""
        linears = [index for index, target in enumerate(targets) if not target.num_experts]
        num_modules = (len(targets) - len(linears)) // TARGETS_PER_EXPERTS
        is_linear_once = self._row_counts == Counter({(index, num_rows): 1 for index in linears})
        return is_linear_once and self._routed_rows == [num_rows] * num_modules

    def is_trained(self, target_index: int) -> bool:
        return False

    def add(self, target_index: int, x_MK: Tensor, y_MN: Tensor) -> SavedLora:
        self._row_counts[target_index, x_MK.shape[0]] += 1
        return ()

    def backward(
        self, target_index: int, x_MK: Tensor, dy_MN: Tensor, saved: SavedLora, dx_MK: Tensor | None
    ) -> None:
        raise AssertionError("equivalence checks have no gradient")

    def adapters_by_row(
        self, num_rows: int
    ) -> tuple[npt.NDArray[np.int64], Sequence[BoundAdapter]]:
        self._routed_rows.append(num_rows)
        return np.full(num_rows, -1, dtype=np.int64), []


class _RecordingAttention:
    """Packed attention that records the options of each layer."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, AttentionOptions]] = []
        self._attention = PackedAttention(CHECK_LENGTHS)

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.calls.append((layer, options))
        return self._attention.attend(layer, q_HTD, k_GTD, v_GTD, options)


class PackedRun(NamedTuple):
    """Result and recorded calls of a packed forward pass."""

    logits_TV: Tensor
    lora: _RecordingLora
    attention_calls: Sequence[tuple[int, AttentionOptions]]
    """Layer and options of each attention call, in order."""


class EquivalenceCheck:
    """Runs a few tokens through a model before and after it is hosted."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config: PreTrainedConfig = model.get_decoder().config
        head = find_lm_head(model)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, head.out_features, (sum(CHECK_LENGTHS),), generator=generator)
        self._tokens_T = tokens.to(head.weight.device)
        parts = [
            model(input_ids=part.unsqueeze(0), use_cache=False).logits[0]
            for part in self._tokens_T.split(CHECK_LENGTHS)
        ]
        self._expected_TV = torch.cat(parts).float().log_softmax(-1)

    @torch.no_grad()
    def run_packed(self, hosted: PackableModel) -> PackedRun:
        """Run the model packed; raises ConfigError if it fails."""
        device = self._tokens_T.device
        positions_T = torch.cat([torch.arange(length, device=device) for length in CHECK_LENGTHS])
        lora, attention = _RecordingLora(), _RecordingAttention()
        try:
            hidden_TD = hosted.hidden_states(
                self._tokens_T, positions_T, ForwardContext(lora, attention)
            )
        except _FAILURES as error:
            raise unsupported_model_error(
                self._model, f"it fails on packed sequences: {error}"
            ) from error
        logits_TV, _ = hosted.lm_head.logits(hidden_TD, lora)
        return PackedRun(logits_TV, lora, attention.calls)

    def check(self, hosted: PackableModel) -> dict[int, AttentionOptions]:
        """Return the attention options by layer; raises ConfigError if the results differ."""
        run = self.run_packed(hosted)
        self._check_attention(run.attention_calls)
        if not run.lora.has_seen_all_once(hosted.lora_targets, sum(CHECK_LENGTHS)):
            raise unsupported_model_error(
                self._model, "its linear layers are not given every token once"
            )
        is_float32 = run.logits_TV.dtype == torch.float32
        error = (run.logits_TV.float().log_softmax(-1) - self._expected_TV).abs().max().item()
        # `not <=` also rejects NaN.
        if not error <= (_LOGPROB_TOLERANCE if is_float32 else _LOGPROB_TOLERANCE_16BIT):
            raise unsupported_model_error(
                self._model, f"on packed sequences its log-probabilities are off by {error:.2g}"
            )
        return dict(run.attention_calls)

    def _check_attention(self, calls: Sequence[tuple[int, AttentionOptions]]) -> None:
        """Compare windows with the config; the check's sequences are too short to exceed them."""
        layers = range(self._config.num_hidden_layers)
        if sorted(layer for layer, _ in calls) != list(layers):
            raise unsupported_model_error(self._model, "not every layer attends once")
        window = getattr(self._config, "sliding_window", None)
        if window is None or window >= self._config.max_position_embeddings:
            return
        kinds = getattr(self._config, "layer_types", None) or ["sliding_attention" for _ in layers]
        for layer, options in calls:
            expected = window if kinds[layer] == "sliding_attention" else None
            if options.window != expected:
                raise unsupported_model_error(
                    self._model,
                    f"layer {layer} attends with a window of {options.window}, where its config "
                    f"says {expected}",
                )


CandidateFactory: TypeAlias = Callable[[nn.Module], Sequence[nn.Module]]
#: Maximum error of a replacement's output, relative to the largest element.
_OUTPUT_TOLERANCE = 5e-6
_OUTPUT_TOLERANCE_16BIT = 2e-2


class _Replacement(NamedTuple):
    child: NamedChild
    candidate: nn.Module


def swap_modules(children: Iterable[NamedChild], run: Callable[[], object]) -> None:
    """Replace norms and rotary embeddings; `run` runs the model."""
    _swap_equivalent(
        children, lambda module: rms_norm_candidates(module) or rotary_candidates(module), run
    )


def swap_blocks(
    children: Iterable[NamedChild],
    options_by_layer: Mapping[int, AttentionOptions],
    run: Callable[[], object],
) -> None:
    """Replace MLPs and attention, given the attention options by layer."""

    def candidates_of(module: nn.Module) -> Sequence[nn.Module]:
        layer = getattr(module, "layer_idx", None)
        options = options_by_layer.get(layer) if isinstance(layer, int) else None
        return mlp_candidates(module) if options is None else attention_candidates(module, options)

    _swap_equivalent(children, candidates_of, run)


def _swap_equivalent(
    children: Iterable[NamedChild], candidates_of: CandidateFactory, run: Callable[[], object]
) -> None:
    accepted: list[_Replacement] = []
    with ExitStack() as stack:
        for child in children:
            if candidates := candidates_of(child.module):
                compare = _compare_hook(child, candidates, accepted)
                hook = child.module.register_forward_hook(compare, with_kwargs=True)
                stack.callback(hook.remove)
        run()
    for child, candidate in accepted:
        setattr(child.parent, child.name, candidate)


def _compare_hook(
    child: NamedChild, candidates: Sequence[nn.Module], accepted: list[_Replacement]
) -> Callable[[nn.Module, tuple[object, ...], dict[str, object], object], None]:
    def compare(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> None:
        for candidate in candidates:
            if _is_equivalent(candidate, args, kwargs, _first_output(output)):
                accepted.append(_Replacement(child, candidate))
                return

    return compare


def _is_equivalent(
    candidate: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], expected: Tensor
) -> bool:
    try:
        actual = _first_output(candidate(*args, **kwargs))
    except (RuntimeError, TypeError):
        # Other arguments or shapes: the module is of another kind.
        return False
    tolerance = _OUTPUT_TOLERANCE if expected.dtype == torch.float32 else _OUTPUT_TOLERANCE_16BIT
    is_close = (actual - expected).abs().max() <= tolerance * expected.abs().max()
    has_same_type = actual.shape == expected.shape and actual.dtype == expected.dtype
    return has_same_type and bool(is_close)


def _first_output(output: object) -> Tensor:
    tensor = output[0] if isinstance(output, tuple) else output
    assert isinstance(tensor, Tensor)
    return tensor
