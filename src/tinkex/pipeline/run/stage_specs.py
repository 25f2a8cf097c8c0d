"""The stages of the pipeline, in their order: what each reads, runs and leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinkex.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage; everything it makes is in the directory of its name in OUT_DIR."""

    name: str
    trainer: str
    """The script that trains it, or the module that does."""
    parent: str | None
    """The stage whose result it starts from."""
    legacy_prefix: str = ""
    """How its .pth file is called before the model's width."""
    default_files: tuple[str, ...] = ()
    """Where its data is looked for when no variable names a file; below DATA_ROOT."""

    def directory(self, out_dir: Path) -> Path:
        """Where it keeps everything."""
        return out_dir / self.name

    def model_dir(self, out_dir: Path) -> Path:
        """Its result: a Hugging Face folder."""
        return self.directory(out_dir) / "hf"

    def checkpoint_dir(self, out_dir: Path) -> Path:
        """Where its step checkpoints are."""
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
    """The stages of a run, in their order."""
    left_out = {
        R1.name: not run_r1,
        PRETRAIN.name: skip_pretrain,
        TOKENIZER.name: skip_tokenizer,
    }
    return [stage for stage in STAGE_ORDER if not left_out.get(stage.name, False)]


def stages_from(name: str) -> list[StageSpec]:
    """A stage and all that come after it."""
    if name not in STAGES_BY_NAME:
        raise ConfigError(f"there is no stage {name!r}; there is: {', '.join(STAGES_BY_NAME)}")
    return list(STAGE_ORDER[STAGE_ORDER.index(STAGES_BY_NAME[name]) :])
