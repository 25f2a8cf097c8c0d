"""A frozen transformers model that runs packed sequences of many LoRA adapters.

Any causal language model of transformers is supported whose tokens interact by attention alone. A
model that computes something else when hosted is rejected with a ConfigError.

Shape letters: T rows, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from tinkex.nn.equivalence import CHECK_LENGTHS, EquivalenceCheck, swap_blocks, swap_modules
from tinkex.nn.forward_context import (
    AttentionOptions,
    ForwardContext,
    activate,
    active_context,
    active_forward,
)
from tinkex.nn.fused_decode import FusedDecoder, matches_reference
from tinkex.nn.lm_head import LMHead, find_lm_head, pack_lm_head
from tinkex.nn.lora_layout import LoraTarget, TargetKind
from tinkex.nn.lora_linear import MergedLinearPart, MergedLoraLinear
from tinkex.nn.module_discovery import LinearGroupSpec, ModuleDiscovery, iter_children
from tinkex.nn.moe_experts import LoraExperts, expert_targets, is_experts_module
from tinkex.nn.ops.rotary import max_positions

#: Attention implementation in the config of hosted models.
_ATTENTION_NAME = "tinkex"


class HostedModel:
    """A frozen model whose linear layers accept LoRA adapters."""

    def __init__(
        self, model: PreTrainedModel, *, packed_bytes: int = 0, shardable: bool = False
    ) -> None:
        """Host a model; `packed_bytes` limits the memory for second copies of weights.

        The C kernels need one copy of each weight. Copies are made only for torch, and of an LM
        head whose weight is also that of an unusual embedding. If the model is `shardable`, there
        are neither copies nor fused modules, and all weights of layers are parameters.
        """
        model.eval().requires_grad_(False)
        with ModuleDiscovery(model) as discovery:
            check = EquivalenceCheck(model)
        self._model = model
        self._decoder: PreTrainedModel = model.get_decoder()
        self._decoder.config._attn_implementation = _ATTENTION_NAME
        self._fused_decoder: FusedDecoder | None = None
        self.lora_targets: list[LoraTarget] = []
        """Targets of adapters; a target index is an index in this list."""
        self._layers = discovery.layers
        self._groups = self._install_lora(discovery, shardable=shardable)
        self.lm_head = self._wrap_lm_head(is_packed=not shardable)
        copyable: list[LMHead | MergedLoraLinear] = [self.lm_head, *self._groups]
        for one in () if shardable else copyable:
            if 0 < (copy_bytes := one.copy_bytes) <= packed_bytes:
                one.make_copy()
                packed_bytes -= copy_bytes
        options_by_layer = check.check(self)
        if shardable:
            return
        swap_modules(iter_children(model, [self._decoder]), lambda: check.run_packed(self))
        layer_children = iter_children(model, discovery.layers)
        swap_blocks(layer_children, options_by_layer, lambda: check.run_packed(self))
        check.check(self)
        self._fused_decoder = self._build_fused_decoder(discovery.layers)

    @property
    def config(self) -> PreTrainedConfig:
        """The model's transformers config."""
        return self._model.config

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model, with replaced modules."""
        return self._model

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self.lm_head.vocab_size

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.lm_head.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations; weights may be stored in a smaller one."""
        return self.lm_head.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights and of their copies, unless the model is divided among ranks."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        by_address = {one.data_ptr(): one.nbytes for one in tensors if not one.is_meta}
        groups_bytes = sum(group.num_bytes for group in self._groups)
        return sum(by_address.values()) + self.lm_head.num_bytes + groups_bytes

    @property
    def is_collective(self) -> bool:
        """Whether all ranks must run every pass."""
        return False

    def take_part(self) -> None:
        """Run a pass without a result, because another rank runs one; not if none is collective."""

    @property
    def max_positions(self) -> int | None:
        """Maximum sequence length beyond the config's own limit; None if there is no such limit.

        Longrope models change the angles of all positions of a pass once one exceeds this length,
        so a long sequence would change the results of a short one.
        """
        return max_positions(self._decoder.config)

    def hidden_states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        context: ForwardContext,
        *,
        checkpoint_activations: bool = False,
        is_announced: bool = False,
    ) -> Tensor:
        """Return the last hidden states of packed rows, (T, D).

        `checkpoint_activations` saves memory in passes with gradients: only the input of each layer
        is stored, and the backward pass recomputes the rest. `is_announced` matters only if the
        model is collective.
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

    # --- construction ----------------------------------------------------------------------------
    def _install_lora(
        self, discovery: ModuleDiscovery, *, shardable: bool
    ) -> list[MergedLoraLinear]:
        groups = [
            self._merge_linears(spec, shardable=shardable)
            for spec in discovery.linear_groups(CHECK_LENGTHS)
        ]
        for child in list(iter_children(self._model, discovery.layers)):
            if is_experts_module(child.module):
                targets = expert_targets(f"{child.parent_path}.{child.name}", child.module)
                setattr(child.parent, child.name, LoraExperts(len(self.lora_targets), child.module))
                self.lora_targets += targets
        for layer in discovery.layers:
            enable_activation_checkpointing(layer)
        return groups

    def _merge_linears(self, spec: LinearGroupSpec, *, shardable: bool) -> MergedLoraLinear:
        group = MergedLoraLinear(len(self.lora_targets), spec.members, shardable=shardable)
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
        fused = FusedDecoder.from_decoder(self._decoder, layers, self.vocab_size)
        return fused if fused is not None and matches_reference(fused, self.hidden_states) else None

    def _wrap_lm_head(self, *, is_packed: bool = False) -> LMHead:
        linear = find_lm_head(self._model)
        path = next(name for name, one in self._model.named_modules() if one is linear)
        target = LoraTarget(
            kind=TargetKind.UNEMBED,
            paths=(path,),
            in_features=linear.in_features,
            out_features=(linear.out_features,),
        )
        self.lora_targets.append(target)
        packed_weight = pack_lm_head(self._model, linear) if is_packed else None
        return LMHead(len(self.lora_targets) - 1, linear, self.config, packed_weight)


def enable_activation_checkpointing(layer: nn.Module) -> None:
    """Make a layer checkpoint its activations in passes that ask for it."""
    layer.forward = _CheckpointedForward(layer.forward)


class _CheckpointedForward:
    """A layer's `forward` with optional activation checkpointing."""

    def __init__(self, forward: Callable[..., object]) -> None:
        self._forward = forward

    def __call__(self, *args: object, **kwargs: object) -> object:
        run = active_forward()
        if not run.checkpoint_activations or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)

        def recompute(*args: object) -> object:
            # Backward runs after the pass has ended, so its context is activated again.
            with activate(run.context):
                return self._forward(*args, **kwargs)

        return checkpoint(recompute, *args, use_reentrant=False, preserve_rng_state=False)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """Attend with the active backend: (1, heads, T, D) in, (1, T, heads, D) out."""
    attention_options = AttentionOptions(
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window,
        softcap,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    out_THD = active_context().attention.attend(
        layer, query[0], key[0], value[0], attention_options
    )
    return out_THD.unsqueeze(0), None


AttentionInterface.register(_ATTENTION_NAME, _attention_forward)
