"""Base class of the stages: model, configuration and exports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinkex.pipeline.checkpoints.export import export_folder, legacy_name, write_legacy
from tinkex.pipeline.forward import HiddenStates, PackedForward
from tinkex.pipeline.token_file import Indices, TokenFile
from tinkex.pipeline.tokenizer import TextTokenizer
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
