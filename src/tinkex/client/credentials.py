"""Find, store and redact credentials.

This module does no HTTP, and no message or repr contains a secret.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import os
import re
import signal
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from tinkex.client.profiles import lock_for_update
from tinkex.errors import ConfigError, InvalidInput
from tinkex.logs import get_logger
from tinkex.settings import Environment
from tinkex.system.atomic import write_file_atomic

logger = get_logger(__name__)

#: Prefixes of a key of the hosted service and of a JWT.
KEY_PREFIX, JWT_PREFIX = "tml-", "eyJ"
_SECRET_PATTERN = re.compile(r"(?:tml-|eyJ)[\w.~+/=%-]{4,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A key or JWT, or the command that prints one."""

    source: str
    """Where it was found, for messages."""
    value: str | None = field(default=None, repr=False)
    """The secret itself; None when a command prints it."""
    command: str | None = field(default=None, repr=False)
    """The shell command, run for every exchange."""

    @property
    def is_jwt(self) -> bool:
        """True if the value is a JWT."""
        return self.value is not None and self.value.startswith(JWT_PREFIX)

    async def read(self) -> str:
        """Return the secret; runs the command if there is one."""
        if self.value is not None:
            return self.value
        if self.command is None:
            raise ConfigError(f"The credential from {self.source} is empty")
        return _checked_key(await run_credential_command(self.command), self.source)


def find_credential(
    explicit: str | None, environment: Environment, explicit_source: str = ""
) -> Credential | None:
    """Find a credential: argument, TINKER_API_KEY, TINKER_CREDENTIAL_CMD, stored default key."""
    for source, value in (
        (explicit_source or "api_key argument", explicit),
        (environment.api_key_variable, environment.api_key),
    ):
        if value:
            return Credential(source=source, value=_checked_key(value, source))
    if environment.credential_command:
        return Credential(source="TINKER_CREDENTIAL_CMD", command=environment.credential_command)
    if environment.credentials_file == Path():
        return None
    record = CredentialStore(environment.credentials_file).read().default_record
    if record is None:
        return None
    source = "credentials file"
    return Credential(source=source, value=_checked_key(record.key, source))


def _checked_key(value: str, source: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"The key from {source} must be a string, got {type(value).__name__}")
    if not value or any(not "!" <= letter <= "~" for letter in value):
        raise ConfigError(
            f"The key from {source} contains a space, a line break or another invalid character",
            hint="Copy the key again, without surrounding characters.",
        )
    if not value.startswith((KEY_PREFIX, JWT_PREFIX)):
        _warn_once(f"The key from {source} does not begin with {KEY_PREFIX!r}", hash(value))
    return value


@lru_cache(maxsize=128)
def _warn_once(text: str, subject: object = None) -> None:
    """Log a warning once for each text and subject."""
    logger.warning(text)


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One stored key, in the format of the official command line."""

    key: str
    name: str
    type: Literal["manual", "generated"] = "manual"
    note: str | None = None
    details: dict[str, object] | None = None

    def __repr__(self) -> str:
        return f"KeyRecord(name={self.name!r}, type={self.type!r})"


class StoredKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The credentials file, version 1."""

    version: Literal[1] = 1
    default: str | None = None
    keys: dict[str, KeyRecord] = {}

    @property
    def default_record(self) -> KeyRecord | None:
        """The record of the default key, if there is one."""
        return self.keys.get(self.default) if self.default is not None else None


class CredentialStore:
    """The credentials file; only its owner may read it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def read(self) -> StoredKeys:
        """Read the stored keys; a missing file has none."""
        return self._convert(self._read_raw())

    def add(self, key_id: str, record: KeyRecord, make_default: bool = True) -> None:
        """Store a key under an id, replacing an existing one."""
        if not key_id:
            raise InvalidInput(f"A stored key needs an id, got {key_id!r}")
        _checked_key(record.key, "key record")
        with self._locked_update() as raw:
            row = msgspec.to_builtins(record)
            keys = raw.setdefault("keys", {})
            assert isinstance(keys, dict)  # checked by _convert
            keys[key_id] = {name: value for name, value in row.items() if value is not None}
            if make_default:
                raw["default"] = key_id

    def remove(self, key_id: str) -> bool:
        """Remove a key; False if the id does not exist."""
        with self._locked_update() as raw:
            keys = raw.get("keys", {})
            assert isinstance(keys, dict)  # checked by _convert
            removed = keys.pop(key_id, None)
            if raw.get("default") == key_id:
                del raw["default"]
        return removed is not None

    @contextlib.contextmanager
    def _locked_update(self) -> Iterator[dict[str, object]]:
        # Updates the raw data, so that fields unknown to this version survive.
        try:
            self._make_folder()
            with lock_for_update(self.path):
                raw = self._read_raw()
                self._convert(raw)
                yield raw
                self._write(raw)
        except OSError as error:
            raise ConfigError(f"Cannot write {self.path}: {error.strerror or error}") from error

    def _make_folder(self) -> None:
        folder = self.path.parent
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _write(self, raw: dict[str, object]) -> None:
        raw.setdefault("version", 1)
        write_file_atomic(self.path, msgspec.json.format(msgspec.json.encode(raw), indent=2))

    def _read_raw(self) -> dict[str, object]:
        try:
            data = self.path.read_bytes()
            mode = stat.S_IMODE(self.path.stat().st_mode)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"Cannot read {self.path}: {error.strerror or error}") from error
        if sys.platform != "win32" and mode & 0o077:
            _warn_once(
                f"{self.path} is readable by other users (mode {mode:04o}); run chmod 600 on it"
            )
        try:
            return msgspec.json.decode(data, type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._invalid_file_error() from error

    def _convert(self, raw: dict[str, object]) -> StoredKeys:
        try:
            return msgspec.convert(raw, StoredKeys)
        except msgspec.ValidationError as error:
            raise self._invalid_file_error() from error

    def _invalid_file_error(self) -> ConfigError:
        # The reason is left out: it could quote the file, which contains keys.
        return ConfigError(
            f"{self.path} is not a credentials file of version 1",
            hint="Move the file away and log in again.",
        )


async def run_credential_command(command: str, timeout_seconds: float = 30.0) -> str:
    """Run a shell command and return the credential it prints."""
    process = await asyncio.create_subprocess_shell(
        command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_seconds):
            output, errors = await process.communicate()
    except BaseException as error:  # a cancellation too must not leave the command running
        await _kill_group(process)
        if not isinstance(error, TimeoutError):
            raise
        message = f"TINKER_CREDENTIAL_CMD did not finish within {timeout_seconds:g} seconds"
        raise ConfigError(message) from None
    credential = output.decode(errors="replace").strip()
    last_line = "".join(errors.decode(errors="replace").strip().splitlines()[-1:])
    reason = f": {redact(last_line, (credential,))}" if last_line else ""
    if process.returncode != 0:
        raise ConfigError(
            f"TINKER_CREDENTIAL_CMD failed with exit code {process.returncode}{reason}"
        )
    if not credential:
        raise ConfigError(f"TINKER_CREDENTIAL_CMD printed no credential{reason}")
    return credential


async def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        if sys.platform != "win32":
            # Including the shell's children: they would keep the pipes open.
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    # Reads to the end, which closes the pipes; a process outside the group could keep them open.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await process.communicate()


def decode_jwt_claims(jwt: str) -> dict[str, object]:
    """Decode the claims of a JWT without checking its signature."""
    parts = jwt.split(".")
    if len(parts) != 3:
        raise InvalidInput(f"A JWT must have three parts separated by dots, got {len(parts)}")
    padded = parts[1] + "=" * (-len(parts[1]) % 4)
    try:
        data = base64.b64decode(padded, altchars=b"-_", validate=True)
        return msgspec.json.decode(data, type=dict[str, object])
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise InvalidInput("The middle part of the JWT does not contain claims") from error


def redact(text: str, secrets: Iterable[str]) -> str:
    """Replace every given secret, and everything that looks like a key or JWT, by ***."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _SECRET_PATTERN.sub("***", text)
