"""Options of settings fields: help, variable, stages, and how their text is parsed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import msgspec

from tinkex.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STAGES = ("pretrain", "sft", "dpo", "r1")
#: Accepted devices, for messages.
DEVICE_CHOICES = "auto, cpu, cuda, cuda:1 or mps"
_TRUE_WORDS, _FALSE_WORDS = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}

#: Converts the text of a flag or variable; raises ValueError with what is expected instead.
TextParser = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Option:
    """How the value of a settings field is given; part of the metadata of the field."""

    parse: TextParser
    help: str = ""
    env: str | None = None
    """The variable that sets it for all stages."""
    parse_env: TextParser | None = None
    """Parses the variable, if it accepts other values than the flag."""
    smoke: str | None = None
    """Last part of the SMOKE_<STAGE>_ variables, which set it for one stage of a smoke test."""
    stages: tuple[str, ...] = STAGES
    affects_weights: bool = True
    """False if it does not change the result of training."""
    is_reserved: bool = False
    """Set by the pipeline run, so PRETRAIN_ARGS and the like may not contain it."""
    is_switch: bool = False
    """A flag without a value."""


P = ParamSpec("P")
T = TypeVar("T")


def _declare(make: Callable[P, Option]) -> Callable[Concatenate[T, P], T]:
    def declare(default: T, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return field(default=default, metadata={"option": make(*args, **kwargs)})

    return declare


#: Declares a dataclass field with a default and an option.
setting = _declare(Option)


def required(parse: Callable[[str], T], help_text: str, *, is_reserved: bool) -> T:
    """Declare a dataclass field with an option and without a default."""
    declared: T = field(metadata={"option": Option(parse, help_text, is_reserved=is_reserved)})
    return declared


def find_options(settings_class: type[DataclassInstance]) -> dict[str, Option]:
    """Return the options of a settings class by field name."""
    return {row.name: row.metadata["option"] for row in fields(settings_class) if row.metadata}


def read_environment(options: Mapping[str, Option], given: Mapping[str, str]) -> dict[str, object]:
    """Return the values of the fields whose variables are set; an empty one counts as unset."""
    values: dict[str, object] = {}
    for name, option in options.items():
        text = given.get(option.env) if option.env else None
        # An empty value is meaningful only for optional paths: it means None.
        if option.env and (text or (text == "" and option.parse is parse_optional_path)):
            values[name] = parse_variable(option.env, text, option.parse_env or option.parse)
    return values


def parse_variable(variable: str, text: str, parse: Callable[[str], T]) -> T:
    """Parse the text of a variable; raises ConfigError with its name."""
    try:
        return parse(text)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{variable} must be {error}; got {text!r}") from None


def convert_values(values: Mapping[str, object], settings_class: type[T]) -> T:
    """Build settings from values by field name; raises ConfigError if a type is wrong."""
    try:
        return msgspec.convert(values, settings_class, dec_hook=_convert_path)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def _convert_path(expected: type, value: object) -> Path:
    if not isinstance(value, str | Path):
        raise TypeError(f"expected a path, got {value!r}")
    return Path(value)


def format_value(value: object) -> str:
    """Format a value as the text of a flag."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def parse_boolean(text: str) -> bool:
    """Parse true or false; `bool("false")` would be True."""
    if text.lower() not in _TRUE_WORDS | _FALSE_WORDS:
        raise ValueError("true or false, 1 or 0")
    return text.lower() in _TRUE_WORDS


def parse_device(text: str) -> str:
    """Parse a device name; the device need not exist."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", text):
        raise ValueError(DEVICE_CHOICES)
    return text


def parse_optional_path(text: str) -> Path | None:
    """Parse the path of a variable; an empty one is None."""
    return Path(text).expanduser() if text else None


def parse_directory(text: str) -> Path:
    """Parse the directory of a variable."""
    return Path(text).expanduser()


def parse_tokens(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def one_of(*names: str) -> Callable[[str], str]:
    """Return a parser that accepts some words."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(" or ".join(names))
        return text

    return parse


def _whole_number(minimum: int) -> Callable[[str], int]:
    expected = f"a whole number of at least {minimum}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError("a whole number") from None
        if number < minimum:
            raise ValueError(expected)
        return number

    return parse


def number_between(
    low: float, high: float = math.inf, *, above: bool = False
) -> Callable[[str], float]:
    """Return a parser of finite numbers; with `above`, `low` itself is excluded."""
    expected = f"a number {'above' if above else 'of at least'} {low:g}"
    if high < math.inf:
        expected = f"a number from {low:g} to {high:g}"

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError("a number") from None
        # Comparisons with NaN are false, so NaN is rejected too.
        if not low <= number <= high or math.isinf(number) or (above and number == low):
            raise ValueError(expected)
        return number

    return parse


COUNT = _whole_number(0)
POSITIVE_INT = _whole_number(1)
POSITIVE = number_between(0, above=True)
NON_NEGATIVE = number_between(0)


def count_or_default(text: str) -> int | None:
    """Parse a whole number; 0 means the default of the trainer."""
    return COUNT(text) or None
