"""Which base models there are: a name and a place each, from flags and from the home's list.

A place is a folder, or the id of a model on the hub of Hugging Face. A GGUF file is a place only
until it has been converted into a folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.models import TINY, built_in
from tinkex.settings import expand_path
from tinkex.system.atomic import write_file_atomic

#: What is taken if nobody names a model and there are several: the one that needs no hub.
DEFAULT_MODEL = "smollm2-135m"
MAX_NAME_LETTERS = 200
_NAME = re.compile(r"[\w.+-]+(/[\w.+-]+)*")
_PATH_LIKE = re.compile(r"[/~.\\]|[A-Za-z]:[/\\]")
_GGUF_MAGIC = b"GGUF"


def is_folder_location(location: str) -> bool:
    """Whether a place means a folder: it looks like a path, or there is one."""
    return _PATH_LIKE.match(location) is not None or (
        "\0" not in location and Path(location).is_dir()
    )


def is_gguf_location(location: str) -> bool:
    """Whether a place means a GGUF file: its name says so, or its first bytes."""
    if "\0" in location:
        return False
    path = expand_path(location)
    try:
        if path.suffix.lower() == ".gguf":
            return not path.is_dir()
        with path.open("rb") if path.is_file() else BytesIO() as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        return False


def parse_source(text: str) -> tuple[str, str]:
    """A name and a place from NAME=PLACE or from a place alone."""
    name, equals, place = text.partition("=")
    if not equals:
        return default_name(text), resolve_location(text)
    if not place:
        raise ConfigError(f"model is {text!r}; expected NAME=PATH or the id of a model on the hub")
    return check_model_name(name), resolve_location(place)


def default_name(location: str) -> str:
    """What a model is called that was given no name: its id, or its folder's or file's own name."""
    if is_gguf_location(location):
        return check_model_name(expand_path(location).stem)
    is_path = _PATH_LIKE.match(location) is not None
    return check_model_name(expand_path(location).name if is_path else location)


def resolve_location(location: str) -> str:
    """The place so that it means the same wherever it is read."""
    return (
        str(expand_path(location))
        if is_folder_location(location) or is_gguf_location(location)
        else location
    )


def check_model_name(name: str) -> str:
    """The name, if clients can use it."""
    if len(name) > MAX_NAME_LETTERS or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.{MAX_NAME_LETTERS}} is no name for a model; use letters, digits and . _ - + "
            "with / between parts"
        )
    return name


def model_folder_name(name: str) -> str:
    """What the folder of a model is called that is made here; no two names share one."""
    check_model_name(name)
    if name.startswith("."):
        raise ConfigError(f"{name!r} begins with a dot; a model that is converted needs another")
    return name.replace("/", "@")


def merge_sources(listed: Mapping[str, str], flags: Iterable[str]) -> dict[str, str]:
    """All models; what a flag says wins over the list."""
    told: dict[str, str] = {}
    for name, place in map(parse_source, flags):
        if told.setdefault(name, place) != place:
            raise ConfigError(f"model {name!r} is named twice: {told[name]} and {place}")
    return {**listed, **told}


def choose_default_model(names: Iterable[str]) -> str | None:
    """The one that is meant if nobody names a model: the usual one, or else the only one.

    What comes with the package counts only if there is nothing else. None means: somebody has to
    say it.
    """
    there = list(names)
    added = [name for name in there if name != TINY]
    if DEFAULT_MODEL in added:
        return DEFAULT_MODEL
    choice = added or there
    return choice[0] if len(choice) == 1 else None


def unknown_model_message(name: str, served: Iterable[str], verb: str = "served") -> str:
    """What to say of a base model that a server does not have: what it has, and how to add one."""
    there = ", ".join(served) or "none"
    command = name if _NAME.fullmatch(name) and len(name) <= MAX_NAME_LETTERS else "NAME"
    return (
        f"base model {name!r:.200} cannot be {verb} here; there is: {there}; "
        f"`tinkex model add {command}` on the server's machine adds it"
    )


def add_built_in_models(models: Mapping[str, str]) -> dict[str, str]:
    """These models and after them those of the package, unless their names are taken."""
    return {**models, **{name: place for name, place in built_in().items() if name not in models}}


# --- the home's list ------------------------------------------------------------------------


def read_model_list(file: Path) -> dict[str, str]:
    """The models of a home, each name with its place; none if there is no list."""
    try:
        found = json.loads(file.read_bytes())["models"]
        return {str(name): str(place) for name, place in found.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"the list of models {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'the list of models {file} is damaged; expected {{"models": {{"NAME": "PLACE"}}}}',
            hint="Correct it, or remove it and add the models again.",
        ) from error


def write_model_list(file: Path, models: Mapping[str, str]) -> None:
    """Replace the models of a home."""
    text = json.dumps({"models": dict(sorted(models.items()))}, indent=2, ensure_ascii=False)
    write_file_atomic(file, (text + "\n").encode())
