"""Credentials: where one is found, how it is kept, and the short-lived token it buys.

Nothing here speaks HTTP, and no secret is ever part of a message or a repr.
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
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from tinkex.client.profiles import file_lock, replace_file
from tinkex.clock import now
from tinkex.errors import APIResponseValidationError, ClientClosed, ConfigError, InvalidInput
from tinkex.logs import get_logger
from tinkex.settings import Environment

if sys.platform != "win32":
    pass

logger = get_logger(__name__)

#: How a key of the hosted service begins, and how a JWT does.
KEY_PREFIX, JWT_PREFIX = "tml-", "eyJ"
#: A token with this much life left is renewed before it is handed out again.
RENEW_BLOCKING_SECONDS = 60.0
#: A token with this much life left is renewed behind the caller's back.
RENEW_BACKGROUND_SECONDS = 300.0
#: How long to leave the server alone after a failed renewal.
RENEW_PAUSE_SECONDS = 60.0

_SECRET_PATTERN = re.compile(r"(?:tml-|eyJ)[\w.~+/=%-]{4,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A key or JWT, or the command that prints one."""

    source: str
    """Where it was found, in words for people."""
    value: str | None = field(default=None, repr=False)
    """The secret itself; None when a command prints it."""
    command: str | None = field(default=None, repr=False)
    """The shell command, run for every exchange."""

    @property
    def is_jwt(self) -> bool:
        """True if the value is a JWT already."""
        return self.value is not None and self.value.startswith(JWT_PREFIX)

    async def read(self) -> str:
        """The secret; runs the command if there is one."""
        if self.value is not None:
            return self.value
        if self.command is None:
            raise ConfigError(f"The credential from {self.source} is empty")
        return _checked_key(await run_credential_command(self.command), self.source)


def find_credential(
    explicit: str | None, environment: Environment, explicit_source: str = ""
) -> Credential | None:
    """The first of argument, TINKER_API_KEY, TINKER_CREDENTIAL_CMD and stored default key."""
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
        raise ConfigError(f"The key from {source} must be text, got {type(value).__name__}")
    if not value or any(not "!" <= letter <= "~" for letter in value):
        raise ConfigError(
            f"The key from {source} holds a space, a line break or another character "
            "that no key has",
            hint="Copy the key again, without anything around it.",
        )
    if not value.startswith((KEY_PREFIX, JWT_PREFIX)):
        _warn_once(f"The key from {source} does not begin with {KEY_PREFIX!r}", hash(value))
    return value


@lru_cache(maxsize=128)
def _warn_once(text: str, about: object = None) -> None:
    """Log a warning, once for each text and thing it is about."""
    logger.warning(text)


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One stored key, in the shape the official command line writes."""

    key: str
    name: str
    type: Literal["manual", "generated"] = "manual"
    note: str | None = None
    details: dict[str, Any] | None = None

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
    """The file that keeps keys between logins; only its owner may read it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def read(self) -> StoredKeys:
        """What the file holds; a missing file holds nothing."""
        return self._convert(self._read_raw())

    def add(self, key_id: str, record: KeyRecord, make_default: bool = True) -> None:
        """Keep a key under an id, in place of an older one with that id."""
        if not key_id:
            raise InvalidInput(f"A stored key needs an id, got {key_id!r}")
        _checked_key(record.key, "key record")
        with self._locked_update() as raw:
            row = msgspec.to_builtins(record)
            keys = raw.setdefault("keys", {})
            keys[key_id] = {name: value for name, value in row.items() if value is not None}
            if make_default:
                raw["default"] = key_id

    def remove(self, key_id: str) -> bool:
        """Forget a key; False if there was none with that id."""
        with self._locked_update() as raw:
            found = raw.get("keys", {}).pop(key_id, None)
            if raw.get("default") == key_id:
                del raw["default"]
        return found is not None

    @contextlib.contextmanager
    def _locked_update(self) -> Iterator[dict[str, Any]]:
        # Plain data is changed, not the typed view, so that fields of newer writers survive.
        try:
            self._make_folder()
            with file_lock(self.path):
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

    def _write(self, raw: dict[str, Any]) -> None:
        raw.setdefault("version", 1)
        replace_file(self.path, msgspec.json.format(msgspec.json.encode(raw), indent=2))

    def _read_raw(self) -> dict[str, Any]:
        try:
            data = self.path.read_bytes()
            mode = stat.S_IMODE(self.path.stat().st_mode)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"Cannot read {self.path}: {error.strerror or error}") from error
        if sys.platform != "win32" and mode & 0o077:
            _warn_once(f"{self.path} can be read by others (mode {mode:04o}); run chmod 600 on it")
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._invalid_file_error() from error

    def _convert(self, raw: dict[str, Any]) -> StoredKeys:
        try:
            return msgspec.convert(raw, StoredKeys)
        except msgspec.ValidationError as error:
            raise self._invalid_file_error() from error

    def _invalid_file_error(self) -> ConfigError:
        # The reason stays out: it could quote the file, and the file is full of keys.
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
    except BaseException as error:
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
            # The shell's children too: they would hold the pipes open for ever.
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    # Read to the end, which closes the pipes; who left the group could keep them open.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await process.communicate()


def decode_jwt_claims(jwt: str) -> dict[str, Any]:
    """The claims of a JWT; its signature is the server's business and is not checked."""
    parts = jwt.split(".")
    if len(parts) != 3:
        raise InvalidInput(f"A JWT has three parts with dots between them, this has {len(parts)}")
    padded = parts[1] + "=" * (-len(parts[1]) % 4)
    try:
        data = base64.b64decode(padded, altchars=b"-_", validate=True)
        return msgspec.json.decode(data, type=dict[str, Any])
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise InvalidInput("The middle part of the JWT holds no claims") from error


class TokenSource:
    """Hands out a valid JWT, exchanging the credential for a new one in time.

    Belongs to one event loop. However many callers wait, one exchange is under way.
    """

    def __init__(
        self,
        credential: Credential,
        exchange: Callable[[str], Awaitable[str]],
        *,
        clock: Callable[[], float] = now,
    ) -> None:
        self._credential = credential
        self._exchange = exchange
        self._clock = clock
        self._token = ""
        self._expires_at = 0.0
        self._paused_until = 0.0
        self._renewal: asyncio.Task[None] | None = None
        self._is_closed = False

    async def get(self) -> str:
        """A token that is valid now; waits for the server only when there is no other way."""
        if self._is_closed:
            raise ClientClosed
        left_seconds = self._expires_at - self._clock()
        is_paused = self._clock() < self._paused_until
        if left_seconds > RENEW_BACKGROUND_SECONDS or (left_seconds > 0 and is_paused):
            return self._token
        renewal = self._start_renewal()
        if left_seconds > RENEW_BLOCKING_SECONDS:
            return self._token
        # wait() neither cancels the task together with this caller nor raises the task's error.
        await asyncio.wait({renewal})
        if renewal.cancelled():
            raise ClientClosed
        if renewal.exception() is not None and self._expires_at <= self._clock():
            renewal.result()
        return self._token

    async def close(self) -> None:
        """Stop a renewal under way; whoever waits for it gets ClientClosed."""
        self._is_closed = True
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait({self._renewal})

    def _start_renewal(self) -> asyncio.Task[None]:
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())
            self._renewal.add_done_callback(self._after_renewal)
        return self._renewal

    async def _renew(self) -> None:
        token = await self._exchange(await self._credential.read())
        received_at = self._clock()
        self._expires_at = received_at + _remaining_seconds(token, received_at)
        self._token = token

    def _after_renewal(self, renewal: asyncio.Task[None]) -> None:
        error = None if renewal.cancelled() else renewal.exception()
        if error is None:
            return
        self._paused_until = self._clock() + RENEW_PAUSE_SECONDS
        secrets = (self._token, self._credential.value or "")
        logger.warning("Renewing the token failed: %s", redact(str(error), secrets))


def _remaining_seconds(token: str, now: float) -> float:
    """How long a token lasts: its whole lifetime where this clock and the server's disagree."""
    try:
        claims = decode_jwt_claims(token)
        expires_at, issued_at = float(claims["exp"]), claims.get("iat")
        left = expires_at - now
        if issued_at is None:
            return left
        lifetime = expires_at - float(issued_at)
        return left if 0 < left <= lifetime else lifetime
    except (InvalidInput, KeyError, TypeError, ValueError) as error:
        raise APIResponseValidationError(
            message="The server's token is not a JWT with an expiry time"
        ) from error


def redact(text: str, secrets: Iterable[str]) -> str:
    """The text with every secret, and whatever looks like one, replaced by ***."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _SECRET_PATTERN.sub("***", text)
