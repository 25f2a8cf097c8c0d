"""Reasoning distillation: thoughts and answers are learned, their tags most of all.

A teacher's probabilities may be learned beside the text:
alpha * cross-entropy + (1 - alpha) * T^2 * KL(teacher || student).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """Learns as SFT does, with a weight on the tags and perhaps a teacher."""

    name = "r1"

    def __init__(
        self, inputs: StageInputs, teacher: PreTrainedModel | None, digest: str = ""
    ) -> None:
        super().__init__(inputs)
        known, tokenizer = inputs.args, inputs.tokenizer
        self._teacher_digest = digest
        self.teacher = None if teacher is None else _teacher_forward(teacher, inputs)
        # A weight by token: 1, and more for each tag. It multiplies the mask, never replaces it.
        tags = [tokenizer.token_id(tag) for tag in known.r1_tokens]
        self._weight_V = torch.ones(inputs.model.config.vocab_size, device=inputs.device)
        self._weight_V[tags] = known.r1_token_weight
        part = inputs.held_out
        self._eval_prompts = eval_prompts(part.file, part.rows, tokenizer, known.max_seq_len)

    def loss_config(self) -> Mapping[str, Any]:
        """The tags' weight and the teacher."""
        known = self.inputs.args
        told: dict[str, Any] = {
            "r1_tokens": list(known.r1_tokens),
            "r1_token_weight": known.r1_token_weight,
        }
        if self.teacher is not None:
            told["teacher"] = self._teacher_digest
            told["distill_alpha"] = known.distill_alpha
            told["distill_temperature"] = known.distill_temperature
        return told

    def loss(self, batch: TokenBatch) -> StageLoss:
        """Weighted cross-entropy, divided by how many tokens count and not by their weights."""
        device = self.inputs.device
        counted_T = batch.loss_mask_T.to(device)
        hidden = self.forward(batch.tokens_T.to(device), batch.lengths)
        states_PD, targets_P = hidden.states_TD[counted_T], batch.targets_T.to(device)[counted_T]
        total = weighted_cross_entropy(
            states_PD, self.forward.head_VD, targets_P, self._weight_V[targets_P]
        )
        weight = float(len(targets_P))
        metrics = {"text_loss": float(total.detach())}
        if self.teacher is not None:
            known = self.inputs.args
            apart = self._distillation_loss(batch, states_PD, counted_T)
            share = (1.0 - known.distill_alpha) * known.distill_temperature**2
            total = known.distill_alpha * total + share * apart
            metrics["teacher_kl"] = float(apart.detach())
        return StageLoss(
            total=add_router_aux_loss(total, hidden, weight), weight=weight, metrics=metrics
        )

    def _distillation_loss(self, batch: TokenBatch, states_PD: Tensor, counted_T: Tensor) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad():
            hidden = self.teacher(batch.tokens_T.to(self.inputs.device), batch.lengths)
            known = TeacherStates(
                hidden.states_TD[counted_T], self.teacher.head_VD.to(states_PD.dtype)
            )
        temperature = self.inputs.args.distill_temperature
        return teacher_kl(states_PD, self.forward.head_VD, known, temperature)

    def evaluate(self) -> Mapping[str, float]:
        """The share of held-out answers that are exactly right, and the loss."""
        right = exact_match(self.model, self.inputs.tokenizer, self._eval_prompts)
        return {"exact_match": right, **perplexity(self.forward, self.held_out, self.inputs.device)}


def _teacher_forward(teacher: PreTrainedModel, inputs: StageInputs) -> PackedForward:
    own, other = inputs.model.config.vocab_size, teacher.config.vocab_size
    if own != other:
        raise ConfigError(
            f"the teacher has {other} tokens and the student {own}; they must share a tokenizer",
            hint="Use a teacher that was made with the student's tokenizer, or none.",
        )
    return PackedForward(teacher.requires_grad_(False).eval(), inputs.dtype)
