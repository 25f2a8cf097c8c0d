"""The run that makes tinkex/tiny: sizes, steps and rates, given to the pipeline as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run.plan import RunFlags
from tinkex.pipeline.run.run_output import RunOutput
from tinkex.pipeline.run.runner import run_pipeline
from tinkex.pipeline.run.stage_specs import DPO
from tinkex.pipeline.tiny import rows

SEED = 1337
#: What each stage's trainer is told besides its number of steps; the steps end it, not the epochs.
#: A model as small as this learns faster than the trainers' defaults; DPO is best left to them.
_STAGE_OPTIONS = {
    "pretrain": "--learning_rate 3e-3",
    "sft": "--learning_rate 2e-3 --muon_lr 0.02",
    "dpo": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAmounts:
    """How much is made and learned."""

    num_rows: Mapping[str, int]
    num_steps: Mapping[str, int]
    num_held_out: int = rows.NUM_HELD_OUT
    """Tasks of each family that are measured."""


#: About a quarter of an hour on one core.
FULL = TrainingAmounts(
    num_rows={"pretrain": 12_000, "sft": 40_000, "dpo": 800},
    num_steps={"pretrain": 900, "sft": 700, "dpo": 50},
)
#: Half a minute: does every step of the recipe work? The model knows nothing.
QUICK = TrainingAmounts(
    num_rows={"pretrain": 60, "sft": 60, "dpo": 20},
    num_steps={"pretrain": 2, "sft": 2, "dpo": 1},
    num_held_out=1,
)


def train(directory: Path, amounts: TrainingAmounts, output: RunOutput) -> Path:
    """Train all stages, or what is left of them; returns the folder of the finished model."""
    data = rows.write_rows(directory / "data", SEED, amounts.num_rows)
    config = make_config(directory / "out", data, amounts)
    run_pipeline(config, RunFlags(), output)
    return DPO.model_dir(config.out_dir)


def make_config(
    out_dir: Path, data: Mapping[str, Path], amounts: TrainingAmounts
) -> PipelineConfig:
    """Everything that the pipeline is told."""
    told = {
        stage: f"--max_steps {amounts.num_steps[stage]} --epochs 1000 --batch_size 4 "
        f"--accumulation_steps 1 {rates}".strip()
        for stage, rates in _STAGE_OPTIONS.items()
    }
    return PipelineConfig(
        out_dir=out_dir,
        tf_dir=None,
        pretrain_json=data["pretrain"],
        sft_json=data["sft"],
        dpo_json=data["dpo"],
        hidden_size=192,
        num_layers=5,
        num_heads=6,
        num_kv_heads=2,
        max_seq_len=256,
        vocab_size=1536,
        optimizer="muon",
        seed=SEED,
        device="cpu",
        save_interval=200,
        keep_last=2,
        pretrain_args=told["pretrain"],
        sft_args=told["sft"],
        dpo_args=told["dpo"],
    )
