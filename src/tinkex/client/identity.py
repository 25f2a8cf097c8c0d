"""Who this client is to the server: its credential, and the tokens made of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tinkex.client.config import Config
from tinkex.client.credentials import JWT_PREFIX, Credential, TokenSource, find_credential
from tinkex.client.http import HttpClient
from tinkex.client.io_loop import IO_LOOP
from tinkex.client.transport import Transport
from tinkex.errors import ConfigError, FailureClass, TinkexError
from tinkex.settings import HOSTED_BASE_URL
from tinkex.wire.endpoints import AUTH_TOKEN

#: Shorter header values are settings, not secrets; hiding every "1" in a text helps nobody.
MIN_SECRET_LENGTH = 8
#: How long the output of a credential command is good for.
COMMAND_CACHE_SECONDS = 300.0


@dataclass(slots=True)
class LastToken:
    """The newest token; the pulse reads it without keeping its owner alive."""

    value: str | None = None
    renew: weakref.WeakMethod[Callable[[], None]] | None = None

    async def get(self) -> str | None:
        """What was used last; asks for a fresh one, for the beats of a client that is idle."""
        renew = self.renew() if self.renew is not None else None
        if renew is not None:
            IO_LOOP.post(renew)
        return self.value


class ClientIdentity:
    """Finds the credential once, and turns it into tokens where the server wants them."""

    def __init__(self, config: Config, http: HttpClient) -> None:
        env = config.environment
        is_of_variable = config.api_key == env.api_key and not config.key_source
        explicit = None if is_of_variable else config.api_key
        self.credential = find_credential(explicit, env, config.key_source)
        if self.credential is None and config.base_url == HOSTED_BASE_URL:
            raise ConfigError(
                "No API key was given",
                hint="Pass api_key=..., set TINKER_API_KEY, or pass base_url=... of your server.",
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
        """Where the credential was found, in words for people."""
        return self.credential.source if self.credential else ""

    @property
    def rate_limit_key(self) -> str | None:
        """What tells this client's lane from others: its key, or the command that prints it."""
        return (self.credential.value or self.credential.command) if self.credential else None

    async def get_credential(self) -> str | None:
        """What to send now."""
        if self._tokens is not None:
            self.last_token.value = await self._tokens.get()
        else:
            self.last_token.value = await self._raw_credential()
        return self.last_token.value

    async def _raw_credential(self) -> str | None:
        """The credential itself; a command's output is kept for a while."""
        if self.credential is None or self.credential.command is None:
            return self.credential.value if self.credential else None
        async with self._command_lock:
            now = time.monotonic()
            if self._command_output is None or now - self._command_ran_at > COMMAND_CACHE_SECONDS:
                self._command_output, self._command_ran_at = await self.credential.read(), now
        return self._command_output

    async def exchange_if_needed(self, foreign: str) -> str:
        """Somebody else's credential in the form this server wants."""
        is_token = foreign.startswith(JWT_PREFIX)
        return foreign if self._tokens is None or is_token else await self._exchange(foreign)

    async def get_token(self) -> str:
        """A token that says who the credential belongs to."""
        if self._tokens is not None:
            return await self._tokens.get()
        if self.credential is not None and self.credential.is_jwt:
            return await self.credential.read()
        raise ConfigError(
            "This server identifies keys without tokens, so it cannot say who you are",
            hint="whoami needs a server with token authentication.",
        )

    def use_tokens(self, default_source: str = "api_key") -> None:
        """From now on exchange the credential for short-lived tokens.

        A server may want that of the credential command, even if a key is at hand.
        """
        command = self._config.environment.credential_command
        is_jwt = self.credential is not None and self.credential.is_jwt
        if default_source == "credential_cmd" and command and not is_jwt:
            self.credential = Credential(source="TINKER_CREDENTIAL_CMD", command=command)
        if self.credential is not None:
            self._tokens = TokenSource(self.credential, self._exchange)
            self.last_token.renew = weakref.WeakMethod(self._renew)

    def secrets(self) -> list[str]:
        """What must never be shown; keys and tokens of the usual form are known by their looks."""
        key = self.credential.value if self.credential else None
        own = (key, self.last_token.value, self._config.environment.access_client_secret)
        others = [text for text in self._config.headers.values() if len(text) >= MIN_SECRET_LENGTH]
        return [secret for secret in (*own, *others) if secret]

    async def _exchange(self, credential: str) -> str:
        plain = Transport(self._config, self._http, _constant_credential(credential), self.source)
        # The server's flags, read with the key, asked for tokens: it is known to be there.
        plain.has_contact = True
        try:
            return (await plain.call(AUTH_TOKEN)).jwt
        except TinkexError as error:
            # Tried often enough here: the request that needs the token must not start over.
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
