"""The stages of the pipeline in order: trainer, parent and files of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinkex.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage; its output is in the subdirectory of its name in OUT_DIR."""

    name: str
    trainer: str
    """Trainer script or module."""
    parent: str | None
    """The stage it starts from."""
    legacy_prefix: str = ""
    """Prefix of its .pth file, before the hidden size."""
    default_files: tuple[str, ...] = ()
    """Default data files below DATA_ROOT."""

    def directory(self, out_dir: Path) -> Path:
        """Return the output directory of the stage."""
        return out_dir / self.name

    def model_dir(self, out_dir: Path) -> Path:
        """Return the directory of the exported Hugging Face folder."""
        return self.directory(out_dir) / "hf"

    def checkpoint_dir(self, out_dir: Path) -> Path:
        """Return the root directory of step checkpoints."""
        return self.directory(out_dir) / "checkpoints"


TOKENIZER = StageSpec(name="tokenizer", trainer="tinkex.pipeline.tokenizer", parent=None)
PRETRAIN = StageSpec(
    name="pretrain",
    trainer="train_pretrain.py",
    parent="tokenizer",
    legacy_prefix="pretrain",
    default_files=("pretrain_hq.jsonl",),
)
SFT = StageSpec(
    name="sft",
    trainer="train_full_sft.py",
    parent="pretrain",
    legacy_prefix="full_sft",
    default_files=("final/sft_high_quality.jsonl",),
)
DPO = StageSpec(
    name="dpo",
    trainer="train_dpo.py",
    parent="sft",
    legacy_prefix="rlhf",
    default_files=("dpo_pairs.jsonl", "dpo.jsonl"),
)
R1 = StageSpec(
    name="r1",
    trainer="train_distill_reason.py",
    parent="dpo",
    legacy_prefix="reason",
    default_files=("r1_mix_1024.jsonl",),
)
STAGE_ORDER = (TOKENIZER, PRETRAIN, SFT, DPO, R1)
STAGES_BY_NAME = {stage.name: stage for stage in STAGE_ORDER}


def select_stages(
    *, run_r1: bool, skip_pretrain: bool, skip_tokenizer: bool = False
) -> list[StageSpec]:
    """Return the stages of a run in order."""
    is_skipped = {
        R1.name: not run_r1,
        PRETRAIN.name: skip_pretrain,
        TOKENIZER.name: skip_tokenizer,
    }
    return [stage for stage in STAGE_ORDER if not is_skipped.get(stage.name, False)]


def stages_from(name: str) -> list[StageSpec]:
    """Return a stage and all later ones."""
    if name not in STAGES_BY_NAME:
        raise ConfigError(f"unknown stage {name!r}; expected one of {', '.join(STAGES_BY_NAME)}")
    return list(STAGE_ORDER[STAGE_ORDER.index(STAGES_BY_NAME[name]) :])
