"""Direct preference optimization (DPO) against a frozen reference model."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from tinkex.pipeline.batches import PairBatch, PairSource
from tinkex.pipeline.forward import PackedForward
from tinkex.pipeline.stage_interface import StageLoss
from tinkex.pipeline.stages.base import BaseStage, DataSplit, StageInputs
from tinkex.pipeline.train.evaluation import pair_logprobs, preference_metrics


class DpoStage(BaseStage):
    """DPO on preference pairs."""

    name = "dpo"

    def __init__(
        self, inputs: StageInputs, reference: PreTrainedModel | None, digest: str = ""
    ) -> None:
        super().__init__(inputs)
        # Copy the initial weights before a checkpoint is loaded over them.
        frozen = copy.deepcopy(inputs.model) if reference is None else reference
        self.reference = PackedForward(frozen.requires_grad_(False).eval(), inputs.dtype)
        self._reference_digest = digest or inputs.parent
        self.source = self._pair_source(inputs.train)
        self.held_out = self._pair_source(inputs.held_out)

    def loss_config(self) -> Mapping[str, object]:
        """Return beta and the digest of the reference."""
        return {"beta": self.inputs.settings.beta, "reference": self._reference_digest}

    def _pair_source(self, split: DataSplit) -> PairSource:
        settings = self.inputs.settings
        return PairSource(
            split.file,
            split.rows,
            max_length=settings.max_seq_len,
            batch_size=settings.batch_size,
            seed=settings.seed,
        )

    def loss(self, batch: PairBatch) -> StageLoss:
        """-log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected))."""
        device = self.inputs.device
        with torch.no_grad():
            reference_N2 = pair_logprobs(self.reference, batch, device)
        log_ratio_N2 = pair_logprobs(self.forward, batch, device) - reference_N2
        margin_N = self.inputs.settings.beta * (log_ratio_N2[:, 0] - log_ratio_N2[:, 1])
        # softplus(-x) is -log sigmoid(x) without overflow.
        total = torch.nn.functional.softplus(-margin_N).sum()
        detached_N = margin_N.detach()
        metrics = {
            "accuracy": float((detached_N.sign() + 1.0).sum()) / 2.0,
            "margin": float(detached_N.sum()),
        }
        return StageLoss(total=total, weight=float(len(margin_N)), metrics=metrics)

    def evaluate(self) -> Mapping[str, float]:
        """Compute preference accuracy and margins on the eval split."""
        return preference_metrics(
            self.forward, self.reference, self.held_out, self.inputs.settings.beta
        )
