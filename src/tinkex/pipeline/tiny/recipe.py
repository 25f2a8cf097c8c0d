"""Training recipe of tinkex/tiny: sizes, steps and learning rates for the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run.plan import RunFlags
from tinkex.pipeline.run.report import RunOutput
from tinkex.pipeline.run.runner import run_pipeline
from tinkex.pipeline.run.stage_specs import DPO
from tinkex.pipeline.tiny import rows

SEED = 1337
#: Additional settings by stage. A model this small tolerates higher learning rates than
#: the defaults, except in DPO.
_STAGE_TRAINING: Mapping[str, Mapping[str, float]] = {
    "pretrain": {"learning_rate": 3e-3},
    "sft": {"learning_rate": 2e-3, "muon_lr": 0.02},
    "dpo": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAmounts:
    """Number of rows, steps and held-out tasks."""

    num_rows: Mapping[str, int]
    num_steps: Mapping[str, int]
    num_held_out: int = rows.NUM_HELD_OUT
    """Held-out tasks per family."""


#: Takes about 15 minutes on one core.
FULL = TrainingAmounts(
    num_rows={"pretrain": 12_000, "sft": 40_000, "dpo": 800},
    num_steps={"pretrain": 900, "sft": 700, "dpo": 50},
)
#: Takes half a minute; tests the recipe, the model is useless.
QUICK = TrainingAmounts(
    num_rows={"pretrain": 60, "sft": 60, "dpo": 20},
    num_steps={"pretrain": 2, "sft": 2, "dpo": 1},
    num_held_out=1,
)


def train(directory: Path, amounts: TrainingAmounts, output: RunOutput) -> Path:
    """Train all stages or resume them; returns the folder of the trained model."""
    data = rows.write_rows(directory / "data", SEED, amounts.num_rows)
    config = make_config(directory / "out", data, amounts)
    run_pipeline(config, RunFlags(), output)
    return DPO.model_dir(config.out_dir)


def make_config(
    out_dir: Path, data: Mapping[str, Path], amounts: TrainingAmounts
) -> PipelineConfig:
    """Build the pipeline configuration."""
    return PipelineConfig(
        out_dir=out_dir,
        tf_dir=None,
        pretrain_json=data["pretrain"],
        sft_json=data["sft"],
        dpo_json=data["dpo"],
        vocab_size=1536,
        training={
            "hidden_size": 192,
            "num_layers": 5,
            "num_heads": 6,
            "num_kv_heads": 2,
            "max_seq_len": 256,
            "epochs": 1000,
            "batch_size": 4,
            "accumulation_steps": 1,
            "optimizer": "muon",
            "seed": SEED,
            "device": "cpu",
            "save_interval": 200,
            "keep_last_checkpoints": 2,
        },
        stage_training={
            stage: {"max_steps": amounts.num_steps[stage], **rates}
            for stage, rates in _STAGE_TRAINING.items()
        },
    )
