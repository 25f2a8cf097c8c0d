"""Pretraining: every token of plain text is predicted from those before it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tinkex.nn.ops.cross_entropy import weighted_cross_entropy
from tinkex.pipeline.batches import PackedSource, TokenBatch
from tinkex.pipeline.stage_interface import StageLoss
from tinkex.pipeline.stages.base import BaseStage, DataSplit, StageInputs, add_router_aux_loss
from tinkex.pipeline.train.evaluation import perplexity


class PretrainStage(BaseStage):
    """Learns all tokens of documents; long ones go on in the next sequence."""

    name = "pretrain"
    split_long = True

    def __init__(self, inputs: StageInputs) -> None:
        super().__init__(inputs)
        self.source = self.packed_source(inputs.train)
        self.held_out = self.packed_source(inputs.held_out)

    def packed_source(self, split: DataSplit) -> PackedSource:
        """Rows as packed sequences."""
        known = self.inputs.args
        return PackedSource(
            split.file,
            split.rows,
            max_length=known.max_seq_len,
            batch_size=known.batch_size,
            seed=known.seed,
            split_long=self.split_long,
        )

    def loss(self, batch: TokenBatch) -> StageLoss:
        """Cross-entropy of the counted tokens; the others cost no logits."""
        device = self.inputs.device
        counted_T = batch.loss_mask_T.to(device)
        hidden = self.forward(batch.tokens_T.to(device), batch.lengths)
        targets_P = batch.targets_T.to(device)[counted_T]
        ones_P = torch.ones(len(targets_P), device=device)
        total = weighted_cross_entropy(
            hidden.states_TD[counted_T], self.forward.head_VD, targets_P, ones_P
        )
        weight = float(len(targets_P))
        return StageLoss(total=add_router_aux_loss(total, hidden, weight), weight=weight)

    def evaluate(self) -> Mapping[str, float]:
        """Loss and perplexity on held-out rows."""
        return perplexity(self.forward, self.held_out, self.inputs.device)


class SftStage(PretrainStage):
    """Learns the assistant's tokens, the end of each turn included.

    A conversation that is too long loses its end: an answer without its question teaches nothing.
    """

    name = "sft"
    split_long = False
