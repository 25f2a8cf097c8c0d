"""Command lines of the trainers, and the options that identify a stage's result."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.pipeline.config import PipelineConfig, StageSizes
from tinkex.pipeline.run.stage_specs import DPO, PRETRAIN, TOKENIZER, StageSpec
from tinkex.pipeline.trainer_arguments import (
    INCIDENTAL_OPTIONS,
    RESERVED_OPTIONS,
    STAGE_DEFAULTS,
    find_problem,
    make_parser,
    option_names,
)

#: Options by name, each with its values; a switch has none.
TrainerOptions = dict[str, tuple[str, ...]]

#: The trainer scripts of a source checkout, beside `src`.
_PROJECT_TRAINERS = Path(__file__).resolve().parents[4] / "trainer"


def trainer_options(
    stage: StageSpec, config: PipelineConfig, data: Path, tokenizer: Path, parent: Path | None
) -> TrainerOptions:
    """Build the options of a stage's trainer, without those for resuming."""
    out_dir = config.out_dir
    sizes = config.sizes.get(stage.name, StageSizes())
    values: dict[str, object] = {
        "out_dir": stage.directory(out_dir),
        "data_path": data,
        "tokenizer_dir": tokenizer,
        "init_from": parent,
        # Explicit, so that a resumed DPO run does not take its checkpoint as the reference.
        "ref_path": parent if stage is DPO else None,
        "max_seq_len": config.max_seq_len,
        "batch_size": sizes.batch or config.batch_size or None,
        "accumulation_steps": config.accum_steps or None,
        "max_steps": sizes.steps or None,
        "limit": sizes.limit or None,
        "eval_samples": sizes.eval_samples or None,
        "optimizer": config.optimizer,
        "muon_lr": _muon_rate(stage, config) if config.optimizer == "muon" else None,
        "weight_decay": config.weight_decay,
        "seed": config.seed,
        "device": config.device,
        "save_interval": config.save_interval,
        "keep_last_checkpoints": config.keep_last,
        "tensorboard_dir": config.tf_dir / stage.name if config.tf_dir else None,
    }
    # A model folder defines the model sizes itself.
    if parent is None or parent.suffix == ".pth":
        values |= _model_options(config)
    options = {name: (str(value),) for name, value in values.items() if value is not None}
    variable = f"{stage.name.upper()}_ARGS"
    return (
        options
        | parse_extra_options(variable, config.smoke_args(stage.name))
        | parse_extra_options(variable, config.extra_args(stage.name))
    )


def _muon_rate(stage: StageSpec, config: PipelineConfig) -> str:
    """Scale MUON_LR, which applies to pretrain, by the ratio of the stages' defaults."""
    # The pretraining rate would destroy the model within a few updates of DPO.
    if stage is PRETRAIN:
        return config.muon_lr
    rates = {name: float(str(defaults["muon_lr"])) for name, defaults in STAGE_DEFAULTS.items()}
    return f"{float(config.muon_lr) * rates[stage.name] / rates[PRETRAIN.name]:.12g}"


def _model_options(config: PipelineConfig) -> dict[str, object]:
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "use_moe": "true" if config.use_moe else "false",
        "num_experts": config.num_experts if config.use_moe else None,
    }


def check_options(stage: StageSpec, arguments: TrainerOptions, tags: Sequence[str] = ()) -> None:
    """Check a trainer's options with its own parser before any stage runs.

    `tags` are the single-token tags that R1 may weight; empty if they are not known yet.
    """
    variable = f"{stage.name.upper()}_ARGS"
    for name in arguments:
        if name not in option_names(stage.name):
            raise ConfigError(
                f"{variable} has --{name}, which is not an option of the {stage.name} trainer",
                hint=f"`python trainer/{stage.trainer} --help` lists its options.",
            )
    parser = make_parser(stage.name)
    parser.exit_on_error = False
    try:
        namespace = parser.parse_args(to_argv(arguments))
    except argparse.ArgumentError as error:
        raise _options_error(stage, str(error)) from None
    if problem := find_problem(stage.name, namespace):
        raise _options_error(stage, problem)
    for tag in namespace.r1_tokens if tags else ():
        if tag not in tags:
            raise _options_error(
                stage,
                f"--r1_tokens has {tag!r}; the single-token tags are {', '.join(tags)}",
            )


def _options_error(stage: StageSpec, reason: str) -> ConfigError:
    return ConfigError(
        f"invalid options for the {stage.name} trainer: {reason}",
        hint=f"Check {stage.name.upper()}_ARGS and the model variables.",
    )


def parse_extra_options(variable: str, text: str) -> TrainerOptions:
    """Parse the extra options in a variable, with shell quoting."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{variable} cannot be read: {error}; got {text!r}") from None
    options: TrainerOptions = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            options[name] = (value,) if equals else ()
        elif name:
            options[name] = (*options[name], word)
        else:
            raise ConfigError(f"{variable} must be options such as --epochs 3; got {word!r}")
    _check_not_reserved(variable, options)
    return options


def _check_not_reserved(variable: str, options: TrainerOptions) -> None:
    for name in options:
        if name in RESERVED_OPTIONS:
            raise ConfigError(f"{variable} may not contain --{name}: the pipeline sets it")


def with_resume_options(arguments: TrainerOptions, step_dir: Path | None) -> TrainerOptions:
    """Add the options to resume from a step checkpoint, if there is one."""
    if step_dir is None:
        return arguments
    return arguments | {"resume": (str(step_dir),), "ckpt_dir": (str(step_dir.parent),)}


def to_argv(arguments: TrainerOptions) -> list[str]:
    """Convert options to command-line words."""
    words: list[str] = []
    for name, values in arguments.items():
        # argparse takes a separate word that starts with a dash for an option.
        if len(values) == 1 and values[0].startswith("-"):
            words.append(f"--{name}={values[0]}")
        else:
            words += [f"--{name}", *values]
    return words


def result_config(arguments: TrainerOptions, data_digest: str) -> dict[str, str]:
    """Return the options that determine a stage's result, apart from its parent."""
    excluded = set(INCIDENTAL_OPTIONS)
    if arguments.get("ref_path") == arguments.get("init_from"):
        # The parent is identified by its digest, not by its path.
        excluded.add("ref_path")
    recorded = {name: " ".join(v) for name, v in arguments.items() if name not in excluded}
    return {"data": data_digest, **recorded}


def describe_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List the changed fields with their old and new values."""
    names = dict.fromkeys([*then, *now])
    return [
        f"{name}: {_format_value(then.get(name))} -> {_format_value(now.get(name))}"
        for name in names
        if then.get(name) != now.get(name)
    ]


def _format_value(value: str | None) -> str:
    if value is None:
        return "(not given)"
    return value if len(value) < 40 else f"{value[:12]}..."


# --- commands -------------------------------------------------------------------------------


def train_command(stage: StageSpec, arguments: TrainerOptions, config: PipelineConfig) -> list[str]:
    """Return the command that trains a stage; torchrun starts several processes."""
    script = trainer_script(stage, config)
    if config.num_processes == 1:
        return [sys.executable, *script, *to_argv(arguments)]
    launcher = [sys.executable, "-m", "tinkex.pipeline.run.ranks"]
    count = f"--nproc_per_node={config.num_processes}"
    return [*launcher, count, *script, *to_argv(arguments)]


def trainer_script(stage: StageSpec, config: PipelineConfig) -> list[str]:
    """Return the trainer's script, or its module if only the package is installed."""
    directory = config.trainer_dir or _PROJECT_TRAINERS
    script = directory / stage.trainer
    if script.is_file():
        return [_relative_to_cwd(script)]
    if config.trainer_dir is not None:
        raise ConfigError(f"TRAINER_DIR: {directory} does not contain {stage.trainer}")
    return ["-m", "tinkex.pipeline.run.trainer", stage.name]


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
