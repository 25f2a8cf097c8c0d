"""Writing profiles: one at a time, all or nothing, for the eyes of their owner."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from uuid import uuid4

from tinkex.cli.commands.auth.toml_text import with_values
from tinkex.client.profiles import read_profiles
from tinkex.errors import ConfigError
from tinkex.home import Home

if sys.platform != "win32":
    import fcntl

_HEADING = "# Servers and keys of tinkex; `tinkex config show` says which are used.\n"


def store_key(home: Home, name: str, settings: Mapping[str, str], *, is_default: bool) -> None:
    """Put settings into a profile, and make it the one that is used if none is named."""
    home.make()
    with _changing(home.profiles_file) as (text, write):
        if is_default:
            text = with_values(text or _HEADING, (), {"default_profile": name})
        write(with_values(text or _HEADING, ("profiles", name), settings))


def drop_key(home: Home, name: str) -> None:
    """Take the key out of a profile; its server stays."""
    with _changing(home.profiles_file) as (text, write):
        write(with_values(text, ("profiles", name), {"api_key": None}))


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[tuple[str, _Write]]:
    """The text of a file that nobody else changes meanwhile, and what writes a new one."""
    # Behind a link there is a file that somebody keeps elsewhere; the link stays.
    place = path.resolve()
    try:
        with _locked(place):
            read_profiles(place)
            text = place.read_bytes().decode() if place.exists() else ""
            yield text, _Write(place)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    except ConfigError as error:
        error.hint = error.hint or f"Change {path} by hand."
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = path.with_name(f".{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Write:
    """Replaces a file as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, text: str) -> None:
        scratch = self._path.with_name(f".{self._path.name}.{uuid4().hex}")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self._path)
        finally:
            scratch.unlink(missing_ok=True)
