"""Profiles of the client: the file config.toml in the home."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.settings import Environment
from tinkex.system.locks import file_lock


@contextlib.contextmanager
def lock_for_update(path: Path) -> Iterator[None]:
    """Wait until no other process changes or creates a file, and keep others waiting meanwhile."""
    with file_lock(path.with_name(f".{path.name}.lock"), wait=True):
        yield


class ProfileSettings(TypedDict, total=False):
    """The settings of a profile."""

    base_url: str
    api_key: str
    project_id: str
    timeout_seconds: float


#: Their types in the file.
PROFILE_SETTINGS: dict[str, tuple[type, ...]] = {
    "base_url": (str,),
    "api_key": (str,),
    "project_id": (str,),
    "timeout_seconds": (int, float),
}
_EXPECTED_FORMAT = "expected [profiles.NAME] tables and default_profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One profile and where it was found."""

    name: str
    path: Path
    """The file that defines it."""
    settings: ProfileSettings = field(repr=False)
    is_explicit: bool
    """True if the caller named it; False if an environment variable or the file did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesFile:
    """All profiles of a home, validated."""

    path: Path
    default: str | None = None
    profiles: Mapping[str, ProfileSettings] = field(default_factory=dict, repr=False)


def find_profile(name: str | None, environment: Environment) -> Profile | None:
    """Return the profile chosen by name, TINKEX_PROFILE or the file's default, in this order."""
    if environment.home == Path():
        if name is not None:
            raise ConfigError(f"unknown profile {name!r}: no home directory is configured")
        return None
    file = read_profiles(Home(environment.home).profiles_file)
    chosen = name or environment.profile or file.default
    if chosen is None:
        return None
    if chosen not in file.profiles:
        known = ", ".join(sorted(file.profiles)) or "none"
        raise ConfigError(
            f"unknown profile {chosen!r} in {file.path}; known: {known}",
            hint=f"Add a table [profiles.{chosen}] with base_url and api_key to that file.",
        )
    return Profile(
        name=chosen,
        path=file.path,
        settings=file.profiles[chosen],
        is_explicit=name is not None,
    )


def read_profiles(path: Path) -> ProfilesFile:
    """Read and validate a file of profiles; a missing file has no profiles."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ProfilesFile(path=path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}",
            hint=f"Make it readable (`chmod u+r {path}`), or move it away.",
        ) from error
    except ValueError as error:
        # The reason is left out: it could quote the file, which contains keys.
        raise ConfigError(
            f"{path} is not a valid TOML file; {_EXPECTED_FORMAT}",
            hint="Correct it, or move it away and add profiles with `tinkex auth login --profile`.",
        ) from error
    default, tables = raw.get("default_profile"), raw.get("profiles", {})
    if not isinstance(default, str | None) or not isinstance(tables, dict):
        raise ConfigError(f"{path} is not a file of profiles; {_EXPECTED_FORMAT}")
    for name, table in tables.items():
        _check_profile(path, name, table)
    return ProfilesFile(path=path, default=default or None, profiles=tables)


def _check_profile(path: Path, name: str, table: object) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: profiles.{name} is not a table; {_EXPECTED_FORMAT}")
    for key, value in table.items():
        if key not in PROFILE_SETTINGS:
            allowed = ", ".join(PROFILE_SETTINGS)
            raise ConfigError(
                f"{path}: unknown setting {key!r} in profile {name!r}; known: {allowed}"
            )
        if not isinstance(value, PROFILE_SETTINGS[key]) or isinstance(value, bool) or value == "":
            expected = "a string" if str in PROFILE_SETTINGS[key] else "a number"
            raise ConfigError(f"{path}: {key!r} of profile {name!r} must be {expected}")
