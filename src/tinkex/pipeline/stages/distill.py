"""Reasoning distillation: SFT with a higher weight on tag tokens and an optional teacher.

The loss with a teacher is
alpha * cross-entropy + (1 - alpha) * T^2 * KL(teacher || student).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinkex.errors import ConfigError
from tinkex.nn.ops.cross_entropy import TeacherStates, teacher_kl, weighted_cross_entropy
from tinkex.pipeline.batches import TokenBatch
from tinkex.pipeline.forward import PackedForward
from tinkex.pipeline.stage_interface import StageLoss
from tinkex.pipeline.stages.base import StageInputs, add_router_aux_loss
from tinkex.pipeline.stages.language_modeling import SftStage
from tinkex.pipeline.train.evaluation import eval_prompts, exact_match, perplexity


class DistillStage(SftStage):
    """SFT with weighted tag tokens and an optional teacher."""

    name = "r1"

    def __init__(
        self, inputs: StageInputs, teacher: PreTrainedModel | None, digest: str = ""
    ) -> None:
        super().__init__(inputs)
        settings, tokenizer = inputs.settings, inputs.tokenizer
        self._teacher_digest = digest
        self.teacher = None if teacher is None else _teacher_forward(teacher, inputs)
        # Loss weight per token id: 1, or the tag weight. It multiplies the loss mask.
        tags = [tokenizer.token_id(tag) for tag in settings.r1_tokens]
        self._weight_V = torch.ones(inputs.model.config.vocab_size, device=inputs.device)
        self._weight_V[tags] = settings.r1_token_weight
        split = inputs.held_out
        self._eval_prompts = eval_prompts(split.file, split.rows, tokenizer, settings.max_seq_len)

    def loss_config(self) -> Mapping[str, object]:
        """Return the tag weights and the teacher settings."""
        settings = self.inputs.settings
        config: dict[str, object] = {
            "r1_tokens": list(settings.r1_tokens),
            "r1_token_weight": settings.r1_token_weight,
        }
        if self.teacher is not None:
            config["teacher"] = self._teacher_digest
            config["distill_alpha"] = settings.distill_alpha
            config["distill_temperature"] = settings.distill_temperature
        return config

    def loss(self, batch: TokenBatch) -> StageLoss:
        """Weighted cross-entropy, normalized by the number of targets, not by their weights."""
        device = self.inputs.device
        target_mask_T = batch.loss_mask_T.to(device)
        hidden = self.forward(batch.tokens_T.to(device), batch.lengths)
        states_PD, targets_P = (
            hidden.states_TD[target_mask_T],
            batch.targets_T.to(device)[target_mask_T],
        )
        total = weighted_cross_entropy(
            states_PD, self.forward.head_VD, targets_P, self._weight_V[targets_P]
        )
        weight = float(len(targets_P))
        metrics = {"text_loss": float(total.detach())}
        if self.teacher is not None:
            settings = self.inputs.settings
            kl = self._distillation_loss(batch, states_PD, target_mask_T)
            kl_weight = (1.0 - settings.distill_alpha) * settings.distill_temperature**2
            total = settings.distill_alpha * total + kl_weight * kl
            metrics["teacher_kl"] = float(kl.detach())
        return StageLoss(
            total=add_router_aux_loss(total, hidden, weight), weight=weight, metrics=metrics
        )

    def _distillation_loss(
        self, batch: TokenBatch, states_PD: Tensor, target_mask_T: Tensor
    ) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad():
            hidden = self.teacher(batch.tokens_T.to(self.inputs.device), batch.lengths)
            teacher_states = TeacherStates(
                hidden.states_TD[target_mask_T], self.teacher.head_VD.to(states_PD.dtype)
            )
        temperature = self.inputs.settings.distill_temperature
        return teacher_kl(states_PD, self.forward.head_VD, teacher_states, temperature)

    def evaluate(self) -> Mapping[str, float]:
        """Compute the exact-match rate and the loss on the eval split."""
        match = exact_match(self.model, self.inputs.tokenizer, self._eval_prompts)
        return {"exact_match": match, **perplexity(self.forward, self.held_out, self.inputs.device)}


def _teacher_forward(teacher: PreTrainedModel, inputs: StageInputs) -> PackedForward:
    own, other = inputs.model.config.vocab_size, teacher.config.vocab_size
    if own != other:
        raise ConfigError(
            f"the teacher has {other} tokens and the student {own}; they must share a tokenizer",
            hint="Use a teacher that was trained with the student's tokenizer, or none.",
        )
    return PackedForward(teacher.requires_grad_(False).eval(), inputs.dtype)
