"""The command lines by which stages are trained, and which options make a result what it is."""

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
    STAGE_DEFAULTS,
    find_problem,
    make_parser,
    option_names,
)

#: Options by name, each with its values; a flag has none.
TrainerOptions = dict[str, tuple[str, ...]]

#: Beside `src` in the project.
_PROJECT_TRAINERS = Path(__file__).resolve().parents[4] / "trainer"
#: What the run itself decides; PRETRAIN_ARGS and the like may not.
_RESERVED_OPTIONS = frozenset(
    {"out_dir", "ckpt_dir", "resume", "data_path", "tokenizer_dir", "init_from", "tensorboard_dir"}
)
#: What does not change the weights that come out. How many rows are held out does: these are
#: not trained on.
_NON_RESULT_OPTIONS = frozenset(
    {
        *_RESERVED_OPTIONS,
        "allow_partial",
        "device",
        "eval_interval",
        "keep_every",
        "keep_last_checkpoints",
        "log_interval",
        "metrics_file",
        "save_interval",
        "save_interval_seconds",
    }
)


def trainer_options(
    stage: StageSpec, config: PipelineConfig, data: Path, tokenizer: Path, parent: Path | None
) -> TrainerOptions:
    """The options of a stage's trainer, without those about resuming."""
    out_dir = config.out_dir
    sizes = config.sizes.get(stage.name, StageSizes())
    values: dict[str, object] = {
        "out_dir": stage.directory(out_dir),
        "data_path": data,
        "tokenizer_dir": tokenizer,
        "init_from": parent,
        # The reference of DPO must not follow from a checkpoint that is resumed.
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
    # A folder knows the sizes of its model; to say them again could only contradict it.
    if parent is None or parent.suffix == ".pth":
        values |= _model_options(config)
    usual = {name: (str(value),) for name, value in values.items() if value is not None}
    variable = f"{stage.name.upper()}_ARGS"
    return (
        usual
        | parse_extra_options(variable, config.smoke_args(stage.name))
        | parse_extra_options(variable, config.extra_args(stage.name))
    )


def _muon_rate(stage: StageSpec, config: PipelineConfig) -> str:
    """MUON_LR is meant for pretrain; later stages are slower by the share of their defaults."""
    # What makes a model from nothing would undo it in a few updates of DPO.
    if stage is PRETRAIN:
        return config.muon_lr
    usual = {name: float(str(told["muon_lr"])) for name, told in STAGE_DEFAULTS.items()}
    return f"{float(config.muon_lr) * usual[stage.name] / usual[PRETRAIN.name]:.12g}"


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
    """Have the trainer's own parser read its options, long before its turn comes.

    `tags` are the single tokens that R1 may weigh; none if they are not known yet.
    """
    variable = f"{stage.name.upper()}_ARGS"
    for name in arguments:
        if name not in option_names(stage.name):
            raise ConfigError(
                f"{variable} has --{name}, which the trainer of {stage.name} does not know",
                hint=f"`python trainer/{stage.trainer} --help` lists what it knows.",
            )
    parser = make_parser(stage.name)
    parser.exit_on_error = False
    try:
        known = parser.parse_args(to_argv(arguments))
    except argparse.ArgumentError as error:
        raise _options_error(stage, str(error)) from None
    if problem := find_problem(stage.name, known):
        raise _options_error(stage, problem)
    for tag in known.r1_tokens if tags else ():
        if tag not in tags:
            raise _options_error(
                stage, f"--r1_tokens has {tag!r}; one token each are {', '.join(tags)}"
            )


def _options_error(stage: StageSpec, reason: str) -> ConfigError:
    return ConfigError(
        f"the trainer of {stage.name} cannot be told this: {reason}",
        hint=f"Look at {stage.name.upper()}_ARGS and the variables of the model.",
    )


def parse_extra_options(variable: str, text: str) -> TrainerOptions:
    """Free options, split as a shell would, which never sees them."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{variable} cannot be read: {error}; got {text!r}") from None
    found: TrainerOptions = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = (value,) if equals else ()
        elif name:
            found[name] = (*found[name], word)
        else:
            raise ConfigError(f"{variable} must be options such as --epochs 3; got {word!r}")
    _check_not_reserved(variable, found)
    return found


def _check_not_reserved(variable: str, found: TrainerOptions) -> None:
    for name in found:
        if name in _RESERVED_OPTIONS:
            raise ConfigError(f"{variable} may not have --{name}: the run itself decides it")


def with_resume_options(arguments: TrainerOptions, step_dir: Path | None) -> TrainerOptions:
    """The options of a trainer that goes on from a step checkpoint, if there is one."""
    if step_dir is None:
        return arguments
    return arguments | {"resume": (str(step_dir),), "ckpt_dir": (str(step_dir.parent),)}


def to_argv(arguments: TrainerOptions) -> list[str]:
    """Options as a command line has them."""
    words: list[str] = []
    for name, values in arguments.items():
        # A value that looks like an option must be part of its word.
        if len(values) == 1 and values[0].startswith("-"):
            words.append(f"--{name}={values[0]}")
        else:
            words += [f"--{name}", *values]
    return words


def result_config(arguments: TrainerOptions, data_digest: str) -> dict[str, str]:
    """What a stage's result follows from, apart from its parent: by this it is known again."""
    left_out = set(_NON_RESULT_OPTIONS)
    if arguments.get("ref_path") == arguments.get("init_from"):
        # The parent's digest says more than its path.
        left_out.add("ref_path")
    told = {name: " ".join(v) for name, v in arguments.items() if name not in left_out}
    return {"data": data_digest, **told}


def describe_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Field by field, what was and what is."""
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


# --- what is started ------------------------------------------------------------------------


def train_command(stage: StageSpec, arguments: TrainerOptions, config: PipelineConfig) -> list[str]:
    """What trains a stage; with several processes, torchrun starts them."""
    script = trainer_script(stage, config)
    if config.num_processes == 1:
        return [sys.executable, *script, *to_argv(arguments)]
    launcher = [sys.executable, "-m", "tinkex.pipeline.run.ranks"]
    count = f"--nproc_per_node={config.num_processes}"
    return [*launcher, count, *script, *to_argv(arguments)]


def trainer_script(stage: StageSpec, config: PipelineConfig) -> list[str]:
    """The trainer's script, or its module where only the package is installed."""
    directory = config.trainer_dir or _PROJECT_TRAINERS
    script = directory / stage.trainer
    if script.is_file():
        return [_relative_to_cwd(script)]
    if config.trainer_dir is not None:
        raise ConfigError(f"there is no {stage.trainer} in {directory}, which TRAINER_DIR names")
    return ["-m", "tinkex.pipeline.run.trainer", stage.name]


def tokenizer_command(data: Sequence[Path], folder: Path, vocab_size: int) -> list[str]:
    """What trains the tokenizer."""
    words = ["--data", *map(str, data), "--out", str(folder), "--vocab_size", str(vocab_size)]
    return [sys.executable, "-m", TOKENIZER.trainer, *words]


def _relative_to_cwd(script: Path) -> str:
    """A path as a person in this directory would write it."""
    try:
        return str(script.relative_to(Path.cwd()))
    except ValueError:
        return str(script)
