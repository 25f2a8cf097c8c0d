"""Next-token prediction: pretraining on text, and SFT on conversations."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tinkex.nn.ops.cross_entropy import weighted_cross_entropy
from tinkex.pipeline.batches import PackedSource, TokenBatch
from tinkex.pipeline.stage_interface import StageLoss
from tinkex.pipeline.stages.base import BaseStage, DataSplit, StageInputs, add_router_aux_loss
from tinkex.pipeline.train.evaluation import perplexity


class PretrainStage(BaseStage):
    """Pretraining: all tokens are targets; long documents continue in the next sequence."""

    name = "pretrain"
    split_long = True

    def __init__(self, inputs: StageInputs) -> None:
        super().__init__(inputs)
        self.source = self.packed_source(inputs.train)
        self.held_out = self.packed_source(inputs.held_out)

    def packed_source(self, split: DataSplit) -> PackedSource:
        """Pack rows into sequences."""
        settings = self.inputs.settings
        return PackedSource(
            split.file,
            split.rows,
            max_length=settings.max_seq_len,
            batch_size=settings.batch_size,
            seed=settings.seed,
            split_long=self.split_long,
        )

    def loss(self, batch: TokenBatch) -> StageLoss:
        """Cross-entropy of the targets; logits are computed only where they are needed."""
        device = self.inputs.device
        target_mask_T = batch.loss_mask_T.to(device)
        hidden = self.forward(batch.tokens_T.to(device), batch.lengths)
        targets_P = batch.targets_T.to(device)[target_mask_T]
        ones_P = torch.ones(len(targets_P), device=device)
        total = weighted_cross_entropy(
            hidden.states_TD[target_mask_T], self.forward.head_VD, targets_P, ones_P
        )
        weight = float(len(targets_P))
        return StageLoss(total=add_router_aux_loss(total, hidden, weight), weight=weight)

    def evaluate(self) -> Mapping[str, float]:
        """Compute loss and perplexity on the eval split."""
        return perplexity(self.forward, self.held_out, self.inputs.device)


class SftStage(PretrainStage):
    """SFT: the assistant's tokens and end-of-turn tokens are targets.

    Long conversations are truncated: an answer without its question is useless for training.
    """

    name = "sft"
    split_long = False
