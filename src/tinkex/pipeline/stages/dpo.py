"""Direct preference optimization: the better answer becomes likelier, measured by a reference."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from tinkex.pipeline.data.batches import PairBatch, PairSource
from tinkex.pipeline.evaluation import pair_logprobs, preferences
from tinkex.pipeline.forward import TrainingPass
from tinkex.pipeline.stage import Loss
from tinkex.pipeline.stages.base import BaseStage, Part, Setting


class DpoStage(BaseStage):
    """Learns from pairs; the reference never changes."""

    name = "dpo"

    def __init__(
        self, setting: Setting, reference: PreTrainedModel | None, digest: str = ""
    ) -> None:
        super().__init__(setting)
        # The start weights, as they are before any checkpoint is put over them.
        frozen = copy.deepcopy(setting.model) if reference is None else reference
        self.reference = TrainingPass(frozen.requires_grad_(False).eval(), setting.dtype)
        self._digest = digest or setting.parent
        self.source = self._pairs(setting.train)
        self.held_out = self._pairs(setting.held_out)

    def own_config(self) -> Mapping[str, Any]:
        """The reference and how firmly it holds."""
        return {"beta": self.setting.arguments.beta, "reference": self._digest}

    def _pairs(self, part: Part) -> PairSource:
        known = self.setting.arguments
        return PairSource(
            part.file,
            part.rows,
            max_length=known.max_seq_len,
            batch_size=known.batch_size,
            seed=known.seed,
        )

    def loss(self, batch: PairBatch) -> Loss:
        """-log sigmoid(beta * how much more the better answer gained than the other one)."""
        device = self.setting.device
        with torch.no_grad():
            known_N2 = pair_logprobs(self.reference, batch, device)
        gain_N2 = pair_logprobs(self.run, batch, device) - known_N2
        margin_N = self.setting.arguments.beta * (gain_N2[:, 0] - gain_N2[:, 1])
        # softplus(-x) is -log sigmoid(x), and does not overflow.
        total = torch.nn.functional.softplus(-margin_N).sum()
        told_N = margin_N.detach()
        metrics = {
            "accuracy": float((told_N.sign() + 1.0).sum()) / 2.0,
            "margin": float(told_N.sum()),
        }
        return Loss(total=total, weight=float(len(margin_N)), metrics=metrics)

    def evaluate(self) -> Mapping[str, float]:
        """Preference accuracy on held-out pairs, and what it comes from."""
        return preferences(self.run, self.reference, self.held_out, self.setting.arguments.beta)
