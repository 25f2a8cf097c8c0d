"""A run as it is meant before anything is trained: stages, data, and options that make sense."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinkex.pipeline.chat import TAGS
from tinkex.pipeline.config import PipelineConfig, StageSizes
from tinkex.pipeline.run import materials
from tinkex.pipeline.run.arguments import (
    Arguments,
    check_arguments,
    recipe_of,
    stage_arguments,
    tokenizer_command,
    train_command,
    with_resume,
)
from tinkex.pipeline.run.flags import RunFlags
from tinkex.pipeline.run.materials import Material
from tinkex.pipeline.run.records import DataFile, combined, describe_data, read_record
from tinkex.pipeline.run.stages import PRETRAIN, SFT, TOKENIZER, Stage, planned
from tinkex.pipeline.run.starts import Start, tokenizer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run does, in which order, with which data."""

    config: PipelineConfig
    flags: RunFlags
    stages: tuple[Stage, ...]
    materials: dict[str, Material]

    @property
    def skips_pretrain(self) -> bool:
        """Whether SFT starts from weights that this run does not make."""
        return self.flags.skip_pretrain or self.config.pretrained_path is not None

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer."""
        return tokenizer_of(self.config, skip_pretrain=self.skips_pretrain)

    def data_of(self, stage: Stage) -> list[Path]:
        """The data files of a stage; the tokenizer reads what pretrain and SFT read."""
        # Not those of DPO and R1: to add one of these later must not change the tokenizer.
        names = (PRETRAIN.name, SFT.name) if stage is TOKENIZER else (stage.name,)
        return [self.materials[name].path for name in names]

    def describe_data(self, stage: Stage) -> list[DataFile]:
        """The data files of a stage with their digests."""
        record = read_record(stage.directory(self.config.out_dir))
        known = record.data if record is not None else ()
        return [describe_data(path, known) for path in self.data_of(stage)]

    def arguments(self, stage: Stage, start: Start) -> Arguments:
        """The options of a stage's trainer."""
        data = self.data_of(stage)[0]
        return stage_arguments(stage, self.config, data, self.tokenizer, start.weights)

    def recipe(self, stage: Stage, start: Start, data: list[DataFile]) -> dict[str, str]:
        """What a stage's result follows from, apart from its parent."""
        if stage is TOKENIZER:
            return {"data": combined(data), "vocab_size": str(self.config.vocab_size)}
        return recipe_of(self.arguments(stage, start), combined(data))

    def command(self, stage: Stage, start: Start, step_dir: Path | None) -> list[str]:
        """The command line that trains a stage, from a step checkpoint if there is one."""
        if stage is TOKENIZER:
            folder = stage.model_dir(self.config.out_dir)
            return tokenizer_command(self.data_of(stage), folder, self.config.vocab_size)
        arguments = with_resume(self.arguments(stage, start), step_dir)
        return train_command(stage, arguments, self.config)


def make_plan(config: PipelineConfig, flags: RunFlags) -> RunPlan:
    """The plan of a run; files that are named and options that are given must make sense."""
    skips = flags.skip_pretrain or config.pretrained_path is not None
    stages = planned(run_r1=flags.run_r1, skip_pretrain=skips, skip_tokenizer=skips)
    chosen = materials.choose(stages, config)
    plan = RunPlan(config=config, flags=flags, stages=tuple(stages), materials=chosen)
    for stage in stages:
        if stage is not TOKENIZER:
            # Which weights it starts from is not known yet, and what can be said is the same.
            start = Start(weights=None if stage is PRETRAIN else Path("start"))
            check_arguments(stage, plan.arguments(stage, start), () if skips else TAGS)
    return plan


def check_data(plan: RunPlan, stage: Stage) -> int:
    """Read every row of a stage's data as its trainer will; returns how many there are."""
    limit = plan.config.sizes.get(stage.name, StageSizes()).limit
    return materials.check(stage.name, plan.materials[stage.name].path, limit)
