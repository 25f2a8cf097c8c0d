"""Read and write trainer settings: command-line flags, and the settings.json of a run."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import NoReturn

from tinkex.errors import ConfigError
from tinkex.pipeline.settings_options import Option, TextParser, convert_values, format_value
from tinkex.pipeline.train_settings import OPTIONS, TrainSettings

#: What the trainers do.
STAGE_DESCRIPTIONS: Mapping[str, str] = {
    "pretrain": "Train a base model on plain text.",
    "sft": "Fine-tune a base model on conversations.",
    "dpo": "Train a model on preference pairs with DPO.",
    "r1": "Train a model to reason before it answers.",
}
#: The stage whose result each stage usually starts from.
PARENT_STAGES: Mapping[str, str] = {"sft": "pretrain", "dpo": "sft", "r1": "dpo"}
#: Defaults that differ between stages.
STAGE_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "pretrain": {"learning_rate": 6e-4, "muon_lr": 0.02, "accumulation_steps": 4},
    "sft": {"learning_rate": 2e-4, "muon_lr": 0.006},
    "dpo": {"learning_rate": 5e-6, "muon_lr": 0.0002, "batch_size": 4},
    "r1": {"learning_rate": 2e-4, "muon_lr": 0.006},
}
#: Sizes of a new model.
DEFAULT_SIZES: Mapping[str, int] = {
    "hidden_size": 512,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 2,
}
#: Version of settings.json.
_VERSION = 1
_DEFAULTS = {field.name: field.default for field in fields(TrainSettings)}


def stage_options(stage: str) -> dict[str, Option]:
    """Return the options of a stage's trainer by name."""
    return {name: option for name, option in OPTIONS.items() if stage in option.stages}


def default_value(stage: str, name: str) -> object:
    """Return the default of a field for a stage; MISSING if it is required."""
    return STAGE_DEFAULTS[stage].get(name, _DEFAULTS[name])


def settings_values(settings: TrainSettings) -> dict[str, object]:
    """Return the values of all fields."""
    return {name: getattr(settings, name) for name in OPTIONS}


def make_settings(stage: str, values: Mapping[str, object]) -> TrainSettings:
    """Build the settings of a stage; a value of None means the stage's default."""
    given = {name: value for name, value in values.items() if value is not None}
    return convert_values({**STAGE_DEFAULTS[stage], **given}, TrainSettings)


def resolve_sizes(settings: TrainSettings) -> dict[str, int]:
    """Return the sizes of a new model; defaults replace those that are not given."""
    return {name: getattr(settings, name) or size for name, size in DEFAULT_SIZES.items()}


def find_problem(stage: str, settings: TrainSettings) -> str | None:
    """Return what is wrong with the combination of settings, or None."""
    sizes = resolve_sizes(settings)
    hidden, heads, kv_heads = sizes["hidden_size"], sizes["num_heads"], sizes["num_kv_heads"]
    # Sizes that are not given come from the parent folder, which is not read here.
    sizes_known = settings.init_from is None or settings.init_from.suffix == ".pth"
    if sizes_known and (hidden % heads or (hidden // heads) % 2):
        return f"--hidden_size {hidden} cannot be split into {heads} heads of an even width"
    if sizes_known and heads % kv_heads:
        return f"--num_heads {heads} is not a multiple of --num_kv_heads {kv_heads}"
    if settings.final_learning_rate > settings.learning_rate:
        return f"--min_learning_rate {settings.final_learning_rate} is above --learning_rate"
    if stage == "r1" and not settings.r1_tokens:
        return "--r1_tokens is empty"
    # Also required to resume: tokenizer, parent and reference are compared with the checkpoint.
    if stage in PARENT_STAGES and settings.init_from is None:
        parent = PARENT_STAGES[stage]
        return f"--init_from is missing: pass a model, such as the folder out/{parent}/hf"
    return None


# --- flags ----------------------------------------------------------------------------------


class _FlagParser(argparse.ArgumentParser):
    """Raises ArgumentError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def parse_arguments(stage: str, argv: Sequence[str] | None = None) -> TrainSettings:
    """Parse a trainer's command line; exits with code 2 if it is invalid."""
    parser = make_parser(stage)
    try:
        return from_flags(stage, argv)
    except (argparse.ArgumentError, ConfigError) as error:
        if isinstance(error, argparse.ArgumentError):
            parser.print_usage(sys.stderr)
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def from_flags(
    stage: str, flags: Sequence[str] | None, base: TrainSettings | None = None
) -> TrainSettings:
    """Build settings from flags, which override those of a --settings file and of `base`.

    Raises ArgumentError for an invalid flag, and ConfigError for an invalid file or settings that
    contradict each other.
    """
    given: dict[str, object] = vars(make_parser(stage).parse_args(flags))
    file = given.pop("settings", None)
    if isinstance(file, Path):
        base = _read_file(stage, file)
    values = {**(settings_values(base) if base is not None else {}), **given}
    required = [name for name, default in _DEFAULTS.items() if default is MISSING]
    if missing := [f"--{name}" for name in required if name not in values]:
        raise argparse.ArgumentError(
            None, f"the following arguments are required: {', '.join(missing)}"
        )
    settings = make_settings(stage, values)
    if problem := find_problem(stage, settings):
        raise ConfigError(problem)
    return settings


def flag_texts(
    stage: str, settings: TrainSettings, spelled: Collection[str] = ()
) -> dict[str, str]:
    """Return the text of each flag that differs from the stage's default or is in `spelled`."""
    return {
        name: format_value(value)
        for name in stage_options(stage)
        if (value := getattr(settings, name)) is not None
        and (name in spelled or value != default_value(stage, name))
    }


def to_flags(stage: str, settings: TrainSettings, spelled: Collection[str] = ()) -> list[str]:
    """Return the command-line words that `from_flags` turns into the same settings."""
    words: list[str] = []
    for name, text in flag_texts(stage, settings, spelled).items():
        if not OPTIONS[name].is_switch:
            words += _flag_words(name, (text,))
        elif text == format_value(True):
            words += _flag_words(name, ())
    return words


def _flag_words(name: str, values: Sequence[str]) -> list[str]:
    # argparse takes a separate word that starts with a dash for an option.
    if len(values) == 1 and values[0].startswith("-"):
        return [f"--{name}={values[0]}"]
    return [f"--{name}", *values]


def parse_extra_flags(stage: str, text: str) -> list[str]:
    """Split the text of PRETRAIN_ARGS and the like, with shell quoting, into flags."""
    variable = f"{stage.upper()}_ARGS"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{variable} cannot be read: {error}; got {text!r}") from None
    values: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = [value] if equals else []
        elif name:
            values[name].append(word)
        else:
            raise ConfigError(f"{variable} must be options such as --epochs 3; got {word!r}")
    for name in values:
        _check_extra_flag(stage, variable, name)
    return [word for name in values for word in _flag_words(name, values[name])]


def _check_extra_flag(stage: str, variable: str, name: str) -> None:
    if name not in stage_options(stage):
        raise ConfigError(
            f"{variable} has --{name}, which is not an option of the {stage} trainer",
            hint=f"`python -m tinkex.pipeline.run.trainer {stage} --help` lists its options.",
        )
    if OPTIONS[name].is_reserved:
        raise ConfigError(f"{variable} may not contain --{name}: the pipeline sets it")


def make_parser(stage: str) -> argparse.ArgumentParser:
    """Build the argument parser of a stage's trainer; it has no defaults."""
    parent = "--init_from FOLDER " if stage in PARENT_STAGES else ""
    parser = _FlagParser(
        # One line, so that an error message is not preceded by a page of options.
        usage=f"%(prog)s --data_path FILE --out_dir FOLDER {parent}[options]; --help lists them",
        description=STAGE_DESCRIPTIONS[stage],
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, option in stage_options(stage).items():
        default = default_value(stage, name)
        text = option.help
        if default is not MISSING and default is not None and default is not False:
            text += f" (default: {format_value(default)})"
        if option.is_switch:
            parser.add_argument(f"--{name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{name}", type=_flag_parser(option.parse), help=text)
    parser.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        help="The settings.json of a pipeline run; flags take precedence.",
    )
    return parser


def _flag_parser(parse: TextParser) -> TextParser:
    def read(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {error}, got {text!r}") from None

    return read


# --- settings.json --------------------------------------------------------------------------


def plain_values(settings: TrainSettings) -> dict[str, object]:
    """Return the values of all fields as JSON can represent them."""
    values = settings_values(settings).items()
    return {name: str(value) if isinstance(value, Path) else value for name, value in values}


def to_json(stage: str, settings: TrainSettings) -> str:
    """Return the content of settings.json."""
    plain = plain_values(settings)
    values = {name: plain[name] for name in stage_options(stage)}
    content = {"version": _VERSION, "stage": stage, "settings": values}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def from_json(stage: str, text: str | bytes) -> TrainSettings:
    """Parse the content of settings.json; raises ConfigError if it is invalid."""
    try:
        content: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"it is not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        version = content.get("version") if isinstance(content, dict) else None
        raise ConfigError(f"its version is {version!r}, expected {_VERSION}")
    if content.get("stage") != stage:
        raise ConfigError(f"it is for the stage {content.get('stage')!r}, not {stage}")
    values = content.get("settings")
    if not isinstance(values, dict):
        raise ConfigError("it has no settings")
    if unknown := sorted(set(values) - set(stage_options(stage))):
        raise ConfigError(f"it has the unknown setting {unknown[0]!r}")
    return make_settings(stage, values)


def _read_file(stage: str, path: Path) -> TrainSettings:
    try:
        return from_json(stage, path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--settings {path} cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"--settings {path} cannot be used: {error.message}") from None
