"""Files with secrets: changed by one process at a time, as a whole, readable by their owner."""

from __future__ import annotations

import contextlib
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.settings import Environment

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Let no other process change a file meanwhile, nor create it."""
    lock = path.with_name(f".{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is whole or the old one, whatever happens."""
    scratch = path.with_name(f".{path.name}.{uuid4().hex}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


#: What a profile may say, and as what.
PROFILE_SETTINGS: dict[str, tuple[type, ...]] = {
    "base_url": (str,),
    "api_key": (str,),
    "project_id": (str,),
    "timeout_seconds": (int, float),
}
_EXPECTED_FORMAT = "expected [profiles.NAME] tables and default_profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One profile, as its file says."""

    name: str
    path: Path
    """The file it stands in."""
    settings: Mapping[str, Any] = field(repr=False)
    is_explicit: bool
    """Whether the caller named it; else a variable or the file did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesFile:
    """All profiles of a home, checked."""

    path: Path
    default: str | None = None
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)


def find_profile(name: str | None, environment: Environment) -> Profile | None:
    """The profile of this name, of TINKEX_PROFILE or of the file, whichever comes first."""
    if environment.home == Path():
        if name is not None:
            raise ConfigError(f"there is no profile {name!r}: no home is known")
        return None
    file = read_profiles(Home(environment.home).profiles_file)
    wanted = name or environment.profile or file.default
    if wanted is None:
        return None
    if wanted not in file.profiles:
        known = ", ".join(sorted(file.profiles)) or "none"
        raise ConfigError(
            f"there is no profile {wanted!r} in {file.path}; there is: {known}",
            hint=f"Add a table [profiles.{wanted}] with base_url and api_key to that file.",
        )
    return Profile(
        name=wanted,
        path=file.path,
        settings=file.profiles[wanted],
        is_explicit=name is not None,
    )


def read_profiles(path: Path) -> ProfilesFile:
    """What a file of profiles says; a missing file says nothing."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ProfilesFile(path=path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}",
            hint=f"Make it a file that you may read (`chmod u+r {path}`), or move it away.",
        ) from error
    except ValueError as error:
        # The reason could quote the file, and the file holds keys.
        raise ConfigError(
            f"{path} is not a valid TOML file; {_EXPECTED_FORMAT}",
            hint="Correct it, or move it away and add profiles with `tinkex auth login --profile`.",
        ) from error
    default, tables = raw.get("default_profile"), raw.get("profiles", {})
    if not isinstance(default, str | None) or not isinstance(tables, dict):
        raise ConfigError(f"{path} has no profiles; {_EXPECTED_FORMAT}")
    for name, table in tables.items():
        _check_profile(path, name, table)
    return ProfilesFile(path=path, default=default or None, profiles=tables)


def _check_profile(path: Path, name: str, table: object) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: profiles.{name} is no table; {_EXPECTED_FORMAT}")
    for key, value in table.items():
        if key not in PROFILE_SETTINGS:
            allowed = ", ".join(PROFILE_SETTINGS)
            raise ConfigError(f"{path}: profile {name!r} has {key!r}; a profile has {allowed}")
        if not isinstance(value, PROFILE_SETTINGS[key]) or isinstance(value, bool) or value == "":
            wanted = "text" if str in PROFILE_SETTINGS[key] else "a number"
            raise ConfigError(f"{path}: {key!r} of profile {name!r} must be {wanted}")
