"""Losses of the stages: pretraining, SFT, DPO and reasoning distillation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinkex.errors import ConfigError
from tinkex.nn.ops.cross_entropy import TeacherStates, teacher_kl, weighted_cross_entropy
from tinkex.pipeline.batches import PackedSource, PairBatch, PairSource, TokenBatch
from tinkex.pipeline.checkpoints.export import export_folder, legacy_name, write_legacy
from tinkex.pipeline.forward import HiddenStates, PackedForward
from tinkex.pipeline.stage_interface import StageLoss
from tinkex.pipeline.token_file import Indices, TokenFile
from tinkex.pipeline.tokenizer import TextTokenizer
from tinkex.pipeline.train.evaluation import (
    eval_prompts,
    exact_match,
    pair_logprobs,
    perplexity,
    preference_metrics,
)
from tinkex.pipeline.train_settings import TrainSettings

#: Settings of a model's config that do not change what it computes.
_IGNORED_CONFIG_KEYS = frozenset({"transformers_version", "_name_or_path", "dtype", "use_cache"})


@dataclass(frozen=True, slots=True)
class DataSplit:
    """A subset of the rows of a token file."""

    file: TokenFile
    rows: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInputs:
    """Everything a stage is built from."""

    settings: TrainSettings
    model: PreTrainedModel
    tokenizer: TextTokenizer
    train: DataSplit
    held_out: DataSplit
    device: torch.device
    dtype: torch.dtype = torch.float32
    parent: str = ""
    """Digest of the initial weights."""


class BaseStage:
    """Model handling common to all stages."""

    name = ""

    def __init__(self, inputs: StageInputs) -> None:
        self.inputs = inputs
        self.model = inputs.model
        self.forward = PackedForward(inputs.model, inputs.dtype)

    @property
    def config(self) -> Mapping[str, object]:
        """Settings that must not change on resume."""
        model = self.model.config.to_dict()
        return {
            "model": {name: model[name] for name in model if name not in _IGNORED_CONFIG_KEYS},
            "tokenizer": self.inputs.tokenizer.digest,
            "data": self.inputs.train.file.digest,
            "num_rows": len(self.inputs.train.rows),
            "parent": self.inputs.parent,
            "max_seq_len": self.inputs.settings.max_seq_len,
            "computes_with": str(self.inputs.dtype).removeprefix("torch."),
            **self.loss_config(),
        }

    def loss_config(self) -> Mapping[str, object]:
        """Return the settings of this stage's loss."""
        return {}

    def write_legacy(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        """Write the single-file weights."""
        write_legacy(weights, directory / legacy_name(self.name, self.model.config))

    def export(self, directory: Path) -> None:
        """Write the Hugging Face folder."""
        export_folder(self.model, self.inputs.tokenizer, directory)


def add_router_aux_loss(total: Tensor, hidden: HiddenStates, weight: float) -> Tensor:
    """Add the load-balancing loss of the experts, if there is one."""
    return total if hidden.router_aux_loss is None else total + hidden.router_aux_loss * weight


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


class DpoStage(BaseStage):
    """Direct preference optimization (DPO) against a frozen reference model."""

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


class DistillStage(SftStage):
    """Reasoning distillation: SFT with a higher weight on tag tokens and an optional teacher.

    The loss with a teacher is alpha * cross-entropy + (1 - alpha) * T^2 * KL(teacher || student).
    """

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
