"""Writing profiles: one at a time, all or nothing, for the eyes of their owner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tinkex.cli.commands.auth.toml_text import set_toml_values
from tinkex.client.private_files import file_lock, replace_file
from tinkex.client.profiles import read_profiles
from tinkex.errors import ConfigError
from tinkex.home import Home

_FILE_HEADER = "# Servers and keys of tinkex; `tinkex config show` says which are used.\n"


def store_key(home: Home, name: str, settings: Mapping[str, str], *, is_default: bool) -> None:
    """Put settings into a profile, and make it the one that is used if none is named."""
    home.create()
    with _edit_profiles(home.profiles_file) as (text, write):
        if is_default:
            text = set_toml_values(text or _FILE_HEADER, (), {"default_profile": name})
        write(set_toml_values(text or _FILE_HEADER, ("profiles", name), settings))


def drop_key(home: Home, name: str) -> None:
    """Take the key out of a profile, which is not the default any more; its server stays."""
    is_default = read_profiles(home.profiles_file).default == name
    with _edit_profiles(home.profiles_file) as (text, write):
        if is_default:
            text = set_toml_values(text, (), {"default_profile": None})
        write(set_toml_values(text, ("profiles", name), {"api_key": None}))


@contextlib.contextmanager
def _edit_profiles(path: Path) -> Iterator[tuple[str, Callable[[str], None]]]:
    """The text of a file that nobody else changes meanwhile, and what writes a new one."""
    # Behind a link there is a file that somebody keeps elsewhere; the link stays.
    place = path.resolve()
    try:
        with file_lock(place):
            read_profiles(place)
            text = place.read_bytes().decode() if place.exists() else ""
            yield text, lambda new: replace_file(place, new.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    except ConfigError as error:
        error.hint = error.hint or f"Change {path} by hand."
        raise
