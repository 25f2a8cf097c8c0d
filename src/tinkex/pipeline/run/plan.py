"""The plan of a run: command-line flags, stages, data files and trainer commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tinkex.data.chatml import TAG_TOKENS
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run import stage_files
from tinkex.pipeline.run.stage_files import StageData
from tinkex.pipeline.run.stage_records import (
    FileFingerprint,
    StageStart,
    combine_digests,
    find_tokenizer,
    fingerprint_file,
    read_record,
)
from tinkex.pipeline.run.stage_specs import (
    PRETRAIN,
    SFT,
    STAGE_ORDER,
    TOKENIZER,
    StageSpec,
    select_stages,
)
from tinkex.pipeline.run.trainer_commands import (
    options_error,
    result_config,
    stage_settings,
    tokenizer_command,
    train_command,
)
from tinkex.pipeline.train_settings import TrainSettings

_DESCRIPTION = """\
Train a language model from scratch: tokenizer, pretrain, SFT, DPO and optionally reasoning (R1).
Run it again after an interruption to resume; completed stages are skipped. Settings are
environment variables such as OUT_DIR, PRETRAIN_JSON, MODEL_HIDDEN_SIZE, SAVE_INTERVAL, KEEP_LAST
and TB_AUTO; see docs/run_script_options.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """Command-line flags of a run."""

    smoke_test: bool = False
    """Test all stages with a small model and few steps."""
    skip_pretrain: bool = False
    """Start SFT from existing weights."""
    run_r1: bool = False
    """Also train the reasoning stage."""
    restart_from: str | None = None
    """Delete this stage and all later ones, and train them again."""


def parse_flags(argv: Sequence[str] | None = None) -> RunFlags:
    """Parse the command line; exits with code 2 if it is invalid."""
    args = _parser().parse_args(argv)
    restart = args.restart_from or (PRETRAIN.name if args.force_pretrain else None)
    if args.skip_pretrain and restart == PRETRAIN.name:
        _parser().error("--skip-pretrain cannot be combined with retraining pretrain")
    return RunFlags(
        smoke_test=args.smoke_test,
        skip_pretrain=args.skip_pretrain,
        run_r1=args.run_r1,
        restart_from=restart,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.sh",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--smoke-test", action="store_true", help="a small model and few steps")
    parser.add_argument("--run-r1", action="store_true", help="also train the reasoning stage")
    parser.add_argument(
        "--skip-pretrain",
        action="store_true",
        help="start SFT from PRETRAINED_PATH, or from the pretrain result in OUT_DIR",
    )
    parser.add_argument(
        "--force-pretrain",
        action="store_true",
        help="train pretrain again; the same as --restart-from pretrain",
    )
    parser.add_argument(
        "--restart-from",
        choices=[stage.name for stage in STAGE_ORDER],
        metavar="STAGE",
        help="delete STAGE and all later ones, and train them again: "
        + ", ".join(stage.name for stage in STAGE_ORDER),
    )
    return parser


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The stages of a run, their data and their commands."""

    config: PipelineConfig
    flags: RunFlags
    stages: tuple[StageSpec, ...]
    stage_data: dict[str, StageData]

    @property
    def skips_pretrain(self) -> bool:
        """True if SFT starts from existing weights."""
        return self.flags.skip_pretrain or self.config.pretrained_path is not None

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return find_tokenizer(self.config, skip_pretrain=self.skips_pretrain)

    def data_paths(self, stage: StageSpec) -> list[Path]:
        """Return the data files of a stage; the tokenizer uses those of pretrain and SFT."""
        # Not those of DPO and R1: adding one of these later must not change the tokenizer.
        names = (PRETRAIN.name, SFT.name) if stage is TOKENIZER else (stage.name,)
        return [self.stage_data[name].path for name in names]

    def fingerprint_data(self, stage: StageSpec) -> list[FileFingerprint]:
        """Return the data files of a stage with their digests."""
        record = read_record(stage.directory(self.config.out_dir))
        known = record.data if record is not None else ()
        return [fingerprint_file(path, known) for path in self.data_paths(stage)]

    def settings(
        self, stage: StageSpec, start: StageStart, step_dir: Path | None = None
    ) -> TrainSettings:
        """Return the settings of a stage's trainer, resuming from `step_dir` if given."""
        data = self.data_paths(stage)[0]
        settings = stage_settings(stage, self.config, data, self.tokenizer, start.weights)
        if step_dir is None:
            return settings
        return replace(settings, resume=str(step_dir), ckpt_dir=step_dir.parent)

    def result_config(
        self, stage: StageSpec, start: StageStart, data: list[FileFingerprint]
    ) -> dict[str, str]:
        """Return the settings that determine a stage's result, apart from its parent."""
        if stage is TOKENIZER:
            return {"data": combine_digests(data), "vocab_size": str(self.config.vocab_size)}
        settings = self.settings(stage, start)
        return result_config(stage, settings, self.config, combine_digests(data))

    def command(self, stage: StageSpec, start: StageStart, step_dir: Path | None) -> list[str]:
        """Return the command that trains a stage, resuming from `step_dir` if given."""
        if stage is TOKENIZER:
            folder = stage.model_dir(self.config.out_dir)
            return tokenizer_command(self.data_paths(stage), folder, self.config.vocab_size)
        return train_command(stage, self.settings(stage, start, step_dir), self.config)


def make_run_plan(config: PipelineConfig, flags: RunFlags) -> RunPlan:
    """Build the plan of a run; raises if a data file or a trainer option is invalid."""
    skips = flags.skip_pretrain or config.pretrained_path is not None
    stages = select_stages(run_r1=flags.run_r1, skip_pretrain=skips, skip_tokenizer=skips)
    chosen = stage_files.choose_data_files(stages, config)
    plan = RunPlan(config=config, flags=flags, stages=tuple(stages), stage_data=chosen)
    for stage in stages:
        if stage is not TOKENIZER:
            # The initial weights are not known yet; any path gives the same options.
            start = StageStart(weights=None if stage is PRETRAIN else Path("start"))
            _check_tags(stage, plan.settings(stage, start), () if skips else TAG_TOKENS)
    return plan


def _check_tags(stage: StageSpec, settings: TrainSettings, tags: Sequence[str]) -> None:
    """Raise ConfigError if R1 weights another tag than `tags`; empty if they are not known yet."""
    for tag in settings.r1_tokens if tags else ():
        if tag not in tags:
            raise options_error(
                stage, f"--r1_tokens has {tag!r}; the single-token tags are {', '.join(tags)}"
            )


def check_data(plan: RunPlan, stage: StageSpec) -> int:
    """Parse all rows of a stage's data; returns their number."""
    limit = plan.config.settings(stage.name).limit
    return stage_files.check_rows(stage.name, plan.stage_data[stage.name].path, limit)
