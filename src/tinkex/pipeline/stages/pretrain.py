"""Pretraining: every token of plain text is predicted from those before it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tinkex.pipeline.data.batches import PackedSource, TokenBatch
from tinkex.pipeline.evaluation import perplexity
from tinkex.pipeline.head import weighted_cross_entropy
from tinkex.pipeline.stage import Loss
from tinkex.pipeline.stages.base import BaseStage, Part, Setting, with_balance


class PretrainStage(BaseStage):
    """Learns all tokens of documents; long ones go on in the next sequence."""

    name = "pretrain"
    is_cut = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.source = self.packed(setting.train)
        self.held_out = self.packed(setting.held_out)

    def packed(self, part: Part) -> PackedSource:
        """Rows as packed sequences."""
        known = self.setting.arguments
        return PackedSource(
            part.file,
            part.rows,
            max_length=known.max_seq_len,
            batch_size=known.batch_size,
            seed=known.seed,
            is_cut=self.is_cut,
        )

    def loss(self, batch: TokenBatch) -> Loss:
        """Cross-entropy of the counted tokens; the others cost no logits."""
        device = self.setting.device
        counted_T = batch.counted_T.to(device)
        hidden = self.run(batch.tokens_T.to(device), batch.lengths)
        targets_P = batch.targets_T.to(device)[counted_T]
        ones_P = torch.ones(len(targets_P), device=device)
        total = weighted_cross_entropy(
            hidden.states_TD[counted_T], self.run.head_VD, targets_P, ones_P
        )
        weight = float(len(targets_P))
        return Loss(total=with_balance(total, hidden, weight), weight=weight)

    def evaluate(self) -> Mapping[str, float]:
        """Loss and perplexity on held-out rows."""
        return perplexity(self.run, self.held_out, self.setting.device)
