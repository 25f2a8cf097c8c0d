"""Direct preference optimization: the better answer becomes likelier, measured by a reference."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from tinkex.pipeline.batches import PairBatch, PairSource
from tinkex.pipeline.forward import PackedForward
from tinkex.pipeline.stage_interface import StageLoss
from tinkex.pipeline.stages.base import BaseStage, DataSplit, StageInputs
from tinkex.pipeline.train.evaluation import pair_logprobs, preference_metrics


class DpoStage(BaseStage):
    """Learns from pairs; the reference never changes."""

    name = "dpo"

    def __init__(
        self, inputs: StageInputs, reference: PreTrainedModel | None, digest: str = ""
    ) -> None:
        super().__init__(inputs)
        # The start weights, as they are before any checkpoint is put over them.
        frozen = copy.deepcopy(inputs.model) if reference is None else reference
        self.reference = PackedForward(frozen.requires_grad_(False).eval(), inputs.dtype)
        self._reference_digest = digest or inputs.parent
        self.source = self._pair_source(inputs.train)
        self.held_out = self._pair_source(inputs.held_out)

    def loss_config(self) -> Mapping[str, Any]:
        """The reference and how firmly it holds."""
        return {"beta": self.inputs.args.beta, "reference": self._reference_digest}

    def _pair_source(self, split: DataSplit) -> PairSource:
        known = self.inputs.args
        return PairSource(
            split.file,
            split.rows,
            max_length=known.max_seq_len,
            batch_size=known.batch_size,
            seed=known.seed,
        )

    def loss(self, batch: PairBatch) -> StageLoss:
        """-log sigmoid(beta * how much more the better answer gained than the other one)."""
        device = self.inputs.device
        with torch.no_grad():
            known_N2 = pair_logprobs(self.reference, batch, device)
        gain_N2 = pair_logprobs(self.forward, batch, device) - known_N2
        margin_N = self.inputs.args.beta * (gain_N2[:, 0] - gain_N2[:, 1])
        # softplus(-x) is -log sigmoid(x), and does not overflow.
        total = torch.nn.functional.softplus(-margin_N).sum()
        told_N = margin_N.detach()
        metrics = {
            "accuracy": float((told_N.sign() + 1.0).sum()) / 2.0,
            "margin": float(told_N.sum()),
        }
        return StageLoss(total=total, weight=float(len(margin_N)), metrics=metrics)

    def evaluate(self) -> Mapping[str, float]:
        """Preference accuracy on held-out pairs, and what it comes from."""
        return preference_metrics(
            self.forward, self.reference, self.held_out, self.inputs.args.beta
        )
