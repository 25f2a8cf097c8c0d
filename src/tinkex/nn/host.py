"""A transformers model that hosts adapters: frozen, packed, every linear map with a place for them.

Any causal language model of transformers will do whose layers mix tokens by attention alone; what
does not run here as it does there is refused when it is taken in.

Shape letters: T rows, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinkex.nn import attention, remembering
from tinkex.nn.decoding import Decoding, proven
from tinkex.nn.experts import Experts, is_table, sites_of
from tinkex.nn.head import Head, find_head
from tinkex.nn.linear import GroupMember, LinearGroup
from tinkex.nn.running import Pass, running
from tinkex.nn.sites import Part, Site
from tinkex.nn.survey import Group, Survey, children
from tinkex.nn.trial import LENGTHS, Trial
from tinkex.nn.twins import replace_blocks, replace_small


class Host:
    """A frozen model with places for adapters."""

    def __init__(self, model: PreTrainedModel, *, packed_bytes: int = 0) -> None:
        """Take a model in; `packed_bytes` is memory for copies of weights, which make it faster.

        The head and the first layers are copied as far as it goes; with less, some gain is lost.
        """
        model.eval().requires_grad_(False)
        with Survey(model) as survey:
            trial = Trial(model)
        self._model = model
        self._decoder: Any = model.get_decoder()
        self._decoder.config._attn_implementation = attention.NAME
        self._decoding: Decoding | None = None
        self.sites: list[Site] = []
        """Where adapters have pairs; a pair's index here is its site's number."""
        groups = self._install(survey)
        self.head = self._take_head()
        copied: list[Head | LinearGroup] = [self.head, *groups]
        for one in copied:
            if one.num_bytes <= packed_bytes:
                one.copy()
                packed_bytes -= one.num_bytes if one.has_copy else 0
        how = trial.check(self)
        replace_small(children(model, [self._decoder]), lambda: trial.run(self))
        replace_blocks(children(model, survey.layers), how, lambda: trial.run(self))
        trial.check(self)
        self._decoding = self._all_at_once(survey.layers)

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
        return self.head.vocab_size

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.head.weight_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes with."""
        return self.head.weight_VD.dtype

    @property
    def max_positions(self) -> int | None:
        """The most positions of a sequence; None if nothing but the model's config limits them.

        Some models turn all positions of a pass another way once one of them is beyond a limit,
        so that a long sequence would change what is said about a short one.
        """
        return max_positions(self._decoder.config)

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, this: Pass, *, save_memory: bool = False
    ) -> Tensor:
        """The last hidden states of packed rows, (T, D).

        To save memory, a pass that is differentiated keeps what goes into each layer and computes
        the rest again on the way back.
        """
        if self._decoding is not None:
            step_TD = self._decoding.hidden(tokens_T, positions_T, this)
            if step_TD is not None:
                return step_TD
        with running(this, save_memory=save_memory):
            out = self._decoder(
                input_ids=tokens_T.unsqueeze(0),
                position_ids=positions_T.unsqueeze(0),
                use_cache=False,
            )
        hidden_TD: Tensor = out.last_hidden_state[0]
        return hidden_TD

    # --- taking a model in -----------------------------------------------------------------------
    def _install(self, survey: Survey) -> list[LinearGroup]:
        groups = [self._replace(found) for found in survey.groups(LENGTHS)]
        for child in list(children(self._model, survey.layers)):
            if is_table(child.module):
                sites = sites_of(f"{child.path}.{child.name}", child.module)
                setattr(child.parent, child.name, Experts(len(self.sites), child.module))
                self.sites += sites
        for layer in survey.layers:
            remembering.install(layer)
        return groups

    def _replace(self, found: Group) -> LinearGroup:
        group = LinearGroup(len(self.sites), found.members)
        self.sites.append(
            Site(
                part=found.part,
                paths=tuple(f"{found.path}.{name}" for name in found.names),
                in_features=group.in_features,
                out_features=tuple(group.sizes),
            )
        )
        for index, name in enumerate(found.names):
            setattr(found.parent, name, GroupMember(group, index))
        return group

    def _all_at_once(self, layers: Sequence[nn.Module]) -> Decoding | None:
        found = Decoding.of(self._decoder, layers, self.vocab_size)
        return found if found is not None and proven(found, self.hidden) else None

    def _take_head(self) -> Head:
        linear = find_head(self._model)
        path = next(name for name, one in self._model.named_modules() if one is linear)
        site = Site(
            part=Part.UNEMBED,
            paths=(path,),
            in_features=linear.in_features,
            out_features=(linear.out_features,),
        )
        self.sites.append(site)
        return Head(len(self.sites) - 1, linear, self.config)


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
