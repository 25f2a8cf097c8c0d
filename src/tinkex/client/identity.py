"""The client's credential, and the short-lived tokens it is exchanged for."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tinkex.client.config import Config
from tinkex.client.credentials import (
    JWT_PREFIX,
    Credential,
    decode_jwt_claims,
    find_credential,
    redact,
)
from tinkex.client.http import HttpClient
from tinkex.client.io_loop import IO_LOOP
from tinkex.client.transport import Transport
from tinkex.clock import now
from tinkex.errors import (
    APIResponseValidationError,
    ClientClosed,
    ConfigError,
    FailureClass,
    InvalidInput,
    TinkexError,
)
from tinkex.logs import get_logger
from tinkex.settings import HOSTED_BASE_URL
from tinkex.wire.endpoints import AUTH_TOKEN

#: Shorter header values are not treated as secrets: redacting every "1" would garble texts.
MIN_SECRET_LENGTH = 8
#: How long the output of a credential command is cached.
COMMAND_CACHE_SECONDS = 300.0
#: A token that expires within this time is renewed before it is used.
RENEW_BLOCKING_SECONDS = 60.0
#: A token that expires within this time is renewed in the background.
RENEW_BACKGROUND_SECONDS = 300.0
#: How long to wait after a failed renewal.
RENEW_PAUSE_SECONDS = 60.0
logger = get_logger(__name__)


class TokenSource:
    """Provides a valid JWT, renewing it before it expires.

    Belongs to one event loop. Concurrent callers share one exchange.
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
        """Return a valid token; waits for the server only if the current one expires soon."""
        if self._is_closed:
            raise ClientClosed
        remaining_seconds = self._expires_at - self._clock()
        is_paused = self._clock() < self._paused_until
        if remaining_seconds > RENEW_BACKGROUND_SECONDS or (remaining_seconds > 0 and is_paused):
            return self._token
        renewal = self._start_renewal()
        if remaining_seconds > RENEW_BLOCKING_SECONDS:
            return self._token
        # wait() neither cancels the task with this caller nor raises the task's error.
        await asyncio.wait({renewal})
        if renewal.cancelled():
            raise ClientClosed
        if renewal.exception() is not None and self._expires_at <= self._clock():
            renewal.result()
        return self._token

    async def close(self) -> None:
        """Cancel a running renewal; its waiters get ClientClosed."""
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
    """Return how long a token is valid; its full lifetime if the clocks disagree."""
    try:
        claims = decode_jwt_claims(token)
        expires_at, issued_at = float(str(claims["exp"])), claims.get("iat")
        remaining = expires_at - now
        if issued_at is None:
            return remaining
        lifetime = expires_at - float(str(issued_at))
        return remaining if 0 < remaining <= lifetime else lifetime
    except (InvalidInput, KeyError, TypeError, ValueError) as error:
        raise APIResponseValidationError(
            message="The server's token is not a JWT with an expiry time"
        ) from error


@dataclass(slots=True)
class LastToken:
    """The latest token; heartbeats read it without keeping its owner alive."""

    value: str | None = None
    renew: weakref.WeakMethod[Callable[[], None]] | None = None

    async def get(self) -> str | None:
        """Return the last token and trigger its renewal, for heartbeats of an idle client."""
        renew = self.renew() if self.renew is not None else None
        if renew is not None:
            IO_LOOP.post(renew)
        return self.value


class ClientIdentity:
    """Provides the credential of a client, or tokens for it if the server requires them."""

    def __init__(self, config: Config, http: HttpClient) -> None:
        env = config.environment
        is_from_environment = config.api_key == env.api_key and not config.key_source
        explicit = None if is_from_environment else config.api_key
        self.credential = find_credential(explicit, env, config.key_source)
        if self.credential is None and config.base_url == HOSTED_BASE_URL:
            raise ConfigError(
                "No API key was given",
                hint="Pass api_key=..., set TINKER_API_KEY, or pass base_url=... for your server.",
            )
        self.last_token = LastToken()
        self._config = config
        self._http = http
        self._tokens: TokenSource | None = None
        self._command_lock = asyncio.Lock()
        self._command_output: str | None = None
        self._command_ran_at = 0.0
        self._renewal: asyncio.Task[None] | None = None

    @property
    def source(self) -> str:
        """Where the credential was found, for messages."""
        return self.credential.source if self.credential else ""

    @property
    def rate_limit_key(self) -> str | None:
        """What identifies the account for rate limits: the key, or the credential command."""
        return (self.credential.value or self.credential.command) if self.credential else None

    async def get_credential(self) -> str | None:
        """Return the credential to send now."""
        if self._tokens is not None:
            self.last_token.value = await self._tokens.get()
        else:
            self.last_token.value = await self._raw_credential()
        return self.last_token.value

    async def _raw_credential(self) -> str | None:
        """Return the credential itself; the output of a command is cached."""
        if self.credential is None or self.credential.command is None:
            return self.credential.value if self.credential else None
        async with self._command_lock:
            now = time.monotonic()
            if self._command_output is None or now - self._command_ran_at > COMMAND_CACHE_SECONDS:
                self._command_output, self._command_ran_at = await self.credential.read(), now
        return self._command_output

    async def exchange_if_needed(self, other: str) -> str:
        """Exchange another credential for a token, if the server requires tokens."""
        is_token = other.startswith(JWT_PREFIX)
        return other if self._tokens is None or is_token else await self._exchange(other)

    async def get_token(self) -> str:
        """Return a token that identifies the owner of the credential."""
        if self._tokens is not None:
            return await self._tokens.get()
        if self.credential is not None and self.credential.is_jwt:
            return await self.credential.read()
        raise ConfigError(
            "This server does not use tokens, so it cannot identify you",
            hint="whoami needs a server with token authentication.",
        )

    def use_tokens(self, default_source: str = "api_key") -> None:
        """Exchange the credential for short-lived tokens from now on.

        The server may require the credential command even if a key is configured.
        """
        command = self._config.environment.credential_command
        is_jwt = self.credential is not None and self.credential.is_jwt
        if default_source == "credential_cmd" and command and not is_jwt:
            self.credential = Credential(source="TINKER_CREDENTIAL_CMD", command=command)
        if self.credential is not None:
            self._tokens = TokenSource(self.credential, self._exchange)
            self.last_token.renew = weakref.WeakMethod(self._renew)

    def secrets(self) -> list[str]:
        """Return the secrets to redact; redact() also recognises keys and JWTs by their prefix."""
        key = self.credential.value if self.credential else None
        own = (key, self.last_token.value, self._config.environment.access_client_secret)
        headers = [text for text in self._config.headers.values() if len(text) >= MIN_SECRET_LENGTH]
        return [secret for secret in (*own, *headers) if secret]

    async def _exchange(self, credential: str) -> str:
        plain = Transport(self._config, self._http, _constant_credential(credential), self.source)
        # The server has already responded: its flags require tokens.
        plain.has_contact = True
        try:
            return (await plain.call(AUTH_TOKEN)).jwt
        except TinkexError as error:
            # Retried here already: the request that needs the token must not retry it again.
            error.verdict = FailureClass(error.is_user_error, is_retryable=False)
            raise

    def _renew(self) -> None:
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.get_running_loop().create_task(self._refresh_quietly())

    async def _refresh_quietly(self) -> None:
        with contextlib.suppress(TinkexError):
            await self.get_credential()


def _constant_credential(value: str) -> Callable[[], Awaitable[str | None]]:
    async def credential() -> str | None:
        return value

    return credential
