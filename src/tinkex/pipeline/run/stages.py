"""The stages of the pipeline, in their order: what each reads, runs and leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinkex.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage; everything it makes is in the directory of its name in OUT_DIR."""

    name: str
    trainer: str
    """The script that trains it, or the module that does."""
    parent: str | None
    """The stage whose result it starts from."""
    legacy: str = ""
    """How its .pth file is called before the model's width."""
    defaults: tuple[str, ...] = ()
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


TOKENIZER = Stage(name="tokenizer", trainer="tinkex.pipeline.tokenizer", parent=None)
PRETRAIN = Stage(
    name="pretrain",
    trainer="train_pretrain.py",
    parent="tokenizer",
    legacy="pretrain",
    defaults=("pretrain_hq.jsonl",),
)
SFT = Stage(
    name="sft",
    trainer="train_full_sft.py",
    parent="pretrain",
    legacy="full_sft",
    defaults=("final/sft_high_quality.jsonl",),
)
DPO = Stage(
    name="dpo",
    trainer="train_dpo.py",
    parent="sft",
    legacy="rlhf",
    defaults=("dpo_pairs.jsonl", "dpo.jsonl"),
)
R1 = Stage(
    name="r1",
    trainer="train_distill_reason.py",
    parent="dpo",
    legacy="reason",
    defaults=("r1_mix_1024.jsonl",),
)
ORDER = (TOKENIZER, PRETRAIN, SFT, DPO, R1)
BY_NAME = {stage.name: stage for stage in ORDER}


def planned(*, run_r1: bool, skip_pretrain: bool, skip_tokenizer: bool = False) -> list[Stage]:
    """The stages of a run, in their order."""
    left_out = {
        R1.name: not run_r1,
        PRETRAIN.name: skip_pretrain,
        TOKENIZER.name: skip_tokenizer,
    }
    return [stage for stage in ORDER if not left_out.get(stage.name, False)]


def from_stage(name: str) -> list[Stage]:
    """A stage and all that come after it."""
    if name not in BY_NAME:
        raise ConfigError(f"there is no stage {name!r}; there is: {', '.join(BY_NAME)}")
    return list(ORDER[ORDER.index(BY_NAME[name]) :])
