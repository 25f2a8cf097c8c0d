"""A transformers model that hosts adapters: frozen, packed, every linear map with a place for them.

Any causal language model of transformers will do whose layers mix tokens by attention alone; what
does not run here as it does there is refused when it is taken in.

Shape letters: T rows, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tinkex.nn import packed_attention
from tinkex.nn.equivalence import CHECK_LENGTHS, EquivalenceCheck, swap_blocks, swap_modules
from tinkex.nn.forward_context import ForwardContext, activate, active_forward
from tinkex.nn.fused_decode import FusedDecoder, matches_reference
from tinkex.nn.lm_head import LMHead, find_lm_head
from tinkex.nn.lora_layout import LoraTarget, TargetKind
from tinkex.nn.lora_linear import MergedLinearPart, MergedLoraLinear
from tinkex.nn.module_discovery import LinearGroupSpec, ModuleDiscovery, iter_children
from tinkex.nn.moe_experts import LoraExperts, expert_targets, is_experts_module


class HostedModel:
    """A frozen model with places for adapters."""

    def __init__(self, model: PreTrainedModel, *, packed_bytes: int = 0) -> None:
        """Take a model in; `packed_bytes` is memory for copies of weights, which make it faster.

        The head and the first layers are copied as far as it goes; with less, some gain is lost.
        """
        model.eval().requires_grad_(False)
        with ModuleDiscovery(model) as survey:
            trial = EquivalenceCheck(model)
        self._model = model
        self._decoder: Any = model.get_decoder()
        self._decoder.config._attn_implementation = packed_attention.ATTENTION_NAME
        self._fused_decoder: FusedDecoder | None = None
        self.lora_targets: list[LoraTarget] = []
        """Where adapters have pairs; a pair's index here is its site's number."""
        groups = self._install_lora(survey)
        self.lm_head = self._wrap_lm_head()
        copied: list[LMHead | MergedLoraLinear] = [self.lm_head, *groups]
        for one in copied:
            if one.num_bytes <= packed_bytes:
                one.make_packed_copy()
                packed_bytes -= one.num_bytes if one.has_packed_copy else 0
        how = trial.check(self)
        swap_modules(iter_children(model, [self._decoder]), lambda: trial.run_packed(self))
        swap_blocks(iter_children(model, survey.layers), how, lambda: trial.run_packed(self))
        trial.check(self)
        self._fused_decoder = self._build_fused_decoder(survey.layers)

    @property
    def config(self) -> Any:
        """The model's transformers config."""
        return self._model.config

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model itself, whose linear modules are replaced."""
        return self._model

    @property
    def num_layers(self) -> int:
        """How many layers attend."""
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return self.lm_head.vocab_size

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.lm_head.weight_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes with."""
        return self.lm_head.weight_VD.dtype

    @property
    def max_positions(self) -> int | None:
        """The most positions of a sequence; None if nothing but the model's config limits them.

        Some models turn all positions of a pass another way once one of them is beyond a limit,
        so that a long sequence would change what is said about a short one.
        """
        return max_positions(self._decoder.config)

    def hidden_states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        context: ForwardContext,
        *,
        checkpoint_activations: bool = False,
    ) -> Tensor:
        """The last hidden states of packed rows, (T, D).

        To save memory, a pass that is differentiated keeps what goes into each layer and computes
        the rest again on the way back.
        """
        if self._fused_decoder is not None:
            step_TD = self._fused_decoder.hidden_states(tokens_T, positions_T, context)
            if step_TD is not None:
                return step_TD
        with activate(context, checkpoint_activations=checkpoint_activations):
            out = self._decoder(
                input_ids=tokens_T.unsqueeze(0),
                position_ids=positions_T.unsqueeze(0),
                use_cache=False,
            )
        hidden_TD: Tensor = out.last_hidden_state[0]
        return hidden_TD

    # --- taking a model in -----------------------------------------------------------------------
    def _install_lora(self, discovery: ModuleDiscovery) -> list[MergedLoraLinear]:
        groups = [self._merge_linears(found) for found in discovery.linear_groups(CHECK_LENGTHS)]
        for child in list(iter_children(self._model, discovery.layers)):
            if is_experts_module(child.module):
                sites = expert_targets(f"{child.parent_path}.{child.name}", child.module)
                setattr(child.parent, child.name, LoraExperts(len(self.lora_targets), child.module))
                self.lora_targets += sites
        for layer in discovery.layers:
            enable_activation_checkpointing(layer)
        return groups

    def _merge_linears(self, spec: LinearGroupSpec) -> MergedLoraLinear:
        group = MergedLoraLinear(len(self.lora_targets), spec.members)
        self.lora_targets.append(
            LoraTarget(
                kind=spec.kind,
                paths=tuple(f"{spec.parent_path}.{name}" for name in spec.names),
                in_features=group.in_features,
                out_features=tuple(group.sizes),
            )
        )
        for index, name in enumerate(spec.names):
            setattr(spec.parent, name, MergedLinearPart(group, index))
        return group

    def _build_fused_decoder(self, layers: Sequence[nn.Module]) -> FusedDecoder | None:
        found = FusedDecoder.from_decoder(self._decoder, layers, self.vocab_size)
        return found if found is not None and matches_reference(found, self.hidden_states) else None

    def _wrap_lm_head(self) -> LMHead:
        linear = find_lm_head(self._model)
        path = next(name for name, one in self._model.named_modules() if one is linear)
        site = LoraTarget(
            kind=TargetKind.UNEMBED,
            paths=(path,),
            in_features=linear.in_features,
            out_features=(linear.out_features,),
        )
        self.lora_targets.append(site)
        return LMHead(len(self.lora_targets) - 1, linear, self.config)


def max_positions(config: Any) -> int | None:
    """The most positions that a model turns all in the same way; None if there is no limit."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    limits = [
        int(kind["original_max_position_embeddings"])
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def enable_activation_checkpointing(layer: nn.Module) -> None:
    """Let a layer obey a pass that saves memory."""
    layer.forward = _CheckpointedForward(layer.forward)


class _CheckpointedForward:
    """A layer's `forward`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = active_forward()
        if not run.checkpoint_activations or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)

        def again(*args: Any) -> Any:
            # The way back runs when the pass is long over.
            with activate(run.context):
                return self._forward(*args, **kwargs)

        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False)
