"""Parses which base models are served: a name and a location each, from flags and a file.

A location is a folder or a model id of the Hugging Face Hub. A GGUF file must be converted to a
folder first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.logs import get_logger
from tinkex.models import TINY, built_in
from tinkex.settings import expand_path
from tinkex.system.atomic import write_file_atomic

#: The default if there are several models; it needs no access to the Hub.
DEFAULT_MODEL = "smollm2-135m"
MAX_NAME_LETTERS = 200
_NAME = re.compile(r"[\w.+-]+(/[\w.+-]+)*")
_PATH_LIKE = re.compile(r"[/~.\\]|[A-Za-z]:[/\\]")
_GGUF_MAGIC = b"GGUF"


def is_folder_location(location: str) -> bool:
    """Whether a location is a folder: it looks like a path, or a folder exists there."""
    return _PATH_LIKE.match(location) is not None or (
        "\0" not in location and Path(location).is_dir()
    )


def is_gguf_location(location: str) -> bool:
    """Whether a location is a GGUF file, by its name or its first bytes."""
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
    """Parse NAME=LOCATION or LOCATION to a name and a location."""
    name, equals, location = text.partition("=")
    if not equals:
        return default_name(text), resolve_location(text)
    if not location:
        raise ConfigError(f"model is {text!r}; expected NAME=PATH or a model id of the Hub")
    return check_model_name(name), resolve_location(location)


def default_name(location: str) -> str:
    """The name of a model without a given name: its id, or its folder's or file's name."""
    if is_gguf_location(location):
        return check_model_name(expand_path(location).stem)
    is_path = _PATH_LIKE.match(location) is not None
    return check_model_name(expand_path(location).name if is_path else location)


def resolve_location(location: str) -> str:
    """Make a path absolute, so that it does not depend on the current directory."""
    return (
        str(expand_path(location))
        if is_folder_location(location) or is_gguf_location(location)
        else location
    )


def check_model_name(name: str) -> str:
    """Return the name; raises ConfigError if it is not valid."""
    if len(name) > MAX_NAME_LETTERS or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.{MAX_NAME_LETTERS}} is not a valid model name; use letters, digits and "
            ". _ - + with / between parts"
        )
    return name


def model_folder_name(name: str) -> str:
    """The folder name of a converted model; unique for each model name."""
    check_model_name(name)
    if name.startswith("."):
        raise ConfigError(f"{name!r} begins with a dot; give the converted model another name")
    return name.replace("/", "@")


def merge_sources(listed: Mapping[str, str], flags: Iterable[str]) -> dict[str, str]:
    """Combine the listed models with those of flags, which take precedence."""
    from_flags: dict[str, str] = {}
    for name, location in map(parse_source, flags):
        if from_flags.setdefault(name, location) != location:
            raise ConfigError(f"model {name!r} is given twice: {from_flags[name]} and {location}")
    return {**listed, **from_flags}


def choose_default_model(names: Iterable[str]) -> str | None:
    """The model to use if none is given: DEFAULT_MODEL, or the only one, or None.

    The built-in model counts only if there are no others.
    """
    available = list(names)
    added = [name for name in available if name != TINY]
    if DEFAULT_MODEL in added:
        return DEFAULT_MODEL
    candidates = added or available
    return candidates[0] if len(candidates) == 1 else None


def unknown_model_message(name: str, served: Iterable[str], verb: str = "served") -> str:
    """The error for a base model that is not served: lists those served and how to add it."""
    available = ", ".join(served) or "none"
    command = name if _NAME.fullmatch(name) and len(name) <= MAX_NAME_LETTERS else "NAME"
    return (
        f"base model {name!r:.200} cannot be {verb} here; available: {available}; "
        f"run `tinkex model add {command}` on the server's machine to add it"
    )


def add_built_in_models(models: Mapping[str, str]) -> dict[str, str]:
    """Append the built-in models, unless their names are taken."""
    return {
        **models,
        **{name: location for name, location in built_in().items() if name not in models},
    }


# --- the model list -------------------------------------------------------------------------


def read_model_list(file: Path) -> dict[str, str]:
    """Read the model list: locations by name; empty if the file does not exist."""
    try:
        models = json.loads(file.read_bytes())["models"]
        return {str(name): str(location) for name, location in models.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"the model list {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'the model list {file} is damaged; expected {{"models": {{"NAME": "LOCATION"}}}}',
            hint="Correct it, or remove it and add the models again.",
        ) from error


def write_model_list(file: Path, models: Mapping[str, str]) -> None:
    """Write the model list."""
    text = json.dumps({"models": dict(sorted(models.items()))}, indent=2, ensure_ascii=False)
    write_file_atomic(file, (text + "\n").encode())


LOG = get_logger(__name__)


class BaseModelList:
    """The base models of a server: from its flags, from its home and built into the package."""

    def __init__(self, file: Path, flags: Sequence[str]) -> None:
        self._file = file
        self._flags = flags
        # Taken before the list is read, so the next check notices a change in between.
        self._stamp = _file_stamp(file)

    def read_sources(self) -> dict[str, str]:
        """Map each base model's name to its location."""
        return add_built_in_models(merge_sources(read_model_list(self._file), self._flags))

    def refresh_if_changed(self, replace: Callable[[Mapping[str, str]], None]) -> bool:
        """Call `replace` with the base models if the file has changed; return whether it has."""
        stamp = _file_stamp(self._file)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            replace(self.read_sources())
        except ConfigError as error:
            LOG.warning("ignoring the changed list of base models: %s", error.message)
            return False
        return True


def _file_stamp(file: Path) -> tuple[int, int, int] | None:
    """Inode, modification time and size of a file, to detect changes; None if it is missing."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
