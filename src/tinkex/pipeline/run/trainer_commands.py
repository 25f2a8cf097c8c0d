"""Commands of the trainers, and the settings that identify a stage's result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run.stage_specs import DPO, TOKENIZER, StageSpec
from tinkex.pipeline.settings_sources import (
    DEFAULT_SIZES,
    default_value,
    flag_texts,
    from_flags,
    make_settings,
    parse_extra_flags,
    settings_values,
    stage_options,
    to_flags,
)
from tinkex.pipeline.train_settings import OPTIONS, TrainSettings

#: The file in a stage's directory from which its trainer reads the settings.
SETTINGS_NAME = "settings.json"
#: Options that a run always passes.
_SPELLED = {"max_seq_len", "optimizer", "weight_decay", "seed", "device", "save_interval"}
_SPELLED |= {"keep_last_checkpoints"}
#: The trainer scripts of a source checkout, beside `src`.
_PROJECT_TRAINERS = Path(__file__).resolve().parents[4] / "trainer"


def stage_settings(
    stage: StageSpec, config: PipelineConfig, data: Path, tokenizer: Path, parent: Path | None
) -> TrainSettings:
    """Return the settings of a stage's trainer, without those for resuming."""
    base = replace(
        config.settings(stage.name),
        data_path=data,
        tokenizer_dir=tokenizer,
        init_from=parent,
        # Explicit, so that a resumed DPO run does not take its checkpoint as the reference.
        ref_path=parent if stage is DPO else None,
    )
    if parent is not None and parent.suffix != ".pth":
        # A model folder defines the model sizes itself.
        inherited = dict.fromkeys((*DEFAULT_SIZES, "use_moe", "num_experts"))
        base = make_settings(stage.name, {**settings_values(base), **inherited})
    flags = parse_extra_flags(stage.name, config.extra_args(stage.name))
    try:
        return from_flags(stage.name, flags, base)
    except (argparse.ArgumentError, ConfigError) as error:
        raise options_error(stage, str(error)) from None


def options_error(stage: StageSpec, reason: str) -> ConfigError:
    """Error for invalid options of a stage's trainer."""
    return ConfigError(
        f"invalid options for the {stage.name} trainer: {reason}",
        hint=f"Check {stage.name.upper()}_ARGS and the model variables.",
    )


def spelled_options(stage: StageSpec, settings: TrainSettings, config: PipelineConfig) -> set[str]:
    """Return the options that a run passes even if they are defaults of our trainers.

    The scripts in TRAINER_DIR may have other defaults.
    """
    given = {**config.training, **config.stage_training.get(stage.name, {})}
    names = {name for name, value in given.items() if getattr(settings, name) == value}
    flags = parse_extra_flags(stage.name, config.extra_args(stage.name))
    names |= {flag[2:].partition("=")[0] for flag in flags if flag.startswith("--")}
    if settings.optimizer == "muon":
        names.add("muon_lr")
    if settings.hidden_size is not None:
        names.add("use_moe")
    return names | _SPELLED


def result_config(
    stage: StageSpec, settings: TrainSettings, config: PipelineConfig, data_digest: str
) -> dict[str, str]:
    """Return the settings that determine a stage's result, apart from its parent."""
    spelled = spelled_options(stage, settings, config)
    if settings.ref_path == settings.init_from:
        # The parent is identified by its digest, not by its path.
        settings = replace(settings, ref_path=None)
    recorded = {
        name: text
        for name, text in flag_texts(stage.name, settings, spelled).items()
        if OPTIONS[name].affects_weights and not OPTIONS[name].is_reserved
    }
    return {"data": data_digest, **recorded}


def describe_changes(stage: str, then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List the changed fields with their old and new values."""
    names = dict.fromkeys([*then, *now])
    return [
        f"{name}: {_format_value(then.get(name))} -> {_format_value(now.get(name))}"
        for name in names
        if _read_value(stage, name, then.get(name)) != _read_value(stage, name, now.get(name))
    ]


def _read_value(stage: str, name: str, text: str | None) -> object:
    """Parse a recorded setting: 3e-3 and 0.003 are the same, and so are the default and none."""
    option = stage_options(stage).get(name)
    if option is None:
        return text
    try:
        return default_value(stage, name) if text is None else option.parse(text)
    except ValueError:
        return text


def _format_value(value: str | None) -> str:
    if value is None:
        return "(not given)"
    return value if len(value) < 40 else f"{value[:12]}..."


# --- commands -------------------------------------------------------------------------------


def train_command(stage: StageSpec, settings: TrainSettings, config: PipelineConfig) -> list[str]:
    """Return the command that trains a stage, with all flags."""
    flags = to_flags(stage.name, settings, spelled_options(stage, settings, config))
    return [*_launcher(config), *trainer_script(stage, config), *flags]


def settings_command(stage: StageSpec, config: PipelineConfig) -> list[str]:
    """Return the command that trains a stage with the settings in its settings.json."""
    path = stage.directory(config.out_dir) / SETTINGS_NAME
    return [*_launcher(config), *_trainer_module(stage), "--settings", str(path)]


def _launcher(config: PipelineConfig) -> list[str]:
    """Return the interpreter; torchrun starts several processes."""
    if config.num_processes == 1:
        return [sys.executable]
    count = f"--nproc_per_node={config.num_processes}"
    return [sys.executable, "-m", "tinkex.pipeline.run.ranks", count]


def _trainer_module(stage: StageSpec) -> list[str]:
    return ["-m", "tinkex.pipeline.run.trainer", stage.name]


def trainer_script(stage: StageSpec, config: PipelineConfig) -> list[str]:
    """Return the trainer's script, or its module if only the package is installed."""
    directory = config.trainer_dir or _PROJECT_TRAINERS
    script = directory / stage.trainer
    if script.is_file():
        return [_relative_to_cwd(script)]
    if config.trainer_dir is not None:
        raise ConfigError(f"TRAINER_DIR: {directory} does not contain {stage.trainer}")
    return _trainer_module(stage)


def tokenizer_command(data: Sequence[Path], folder: Path, vocab_size: int) -> list[str]:
    """Return the command that trains the tokenizer."""
    words = ["--data", *map(str, data), "--out", str(folder), "--vocab_size", str(vocab_size)]
    return [sys.executable, "-m", TOKENIZER.trainer, *words]


def _relative_to_cwd(script: Path) -> str:
    """Return the path relative to the current directory if it is below it."""
    try:
        return str(script.relative_to(Path.cwd()))
    except ValueError:
        return str(script)
