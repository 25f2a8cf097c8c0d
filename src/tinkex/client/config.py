"""Client settings: read and checked once, then passed on unchanged."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinkex.client.profiles import Profile, find_profile
from tinkex.errors import ConfigError
from tinkex.settings import HOSTED_BASE_URL, Environment, read_environment

#: The default of `Config.max_response_bytes`; normal results have a few megabytes.
MAX_RESPONSE_BYTES = 2**30
#: The default of `Config.max_unsized_download_bytes`.
MAX_UNSIZED_DOWNLOAD_BYTES = 16 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a client; immutable, so several clients can share one."""

    base_url: str = HOSTED_BASE_URL
    """The server's URL. May have a path prefix; a trailing slash is removed."""
    api_key: str | None = field(default=None, repr=False)
    """The credential sent as X-API-Key."""
    key_source: str = ""
    """Where the key came from; shown when the server rejects it."""
    profile: str | None = None
    """The profile in the home's config.toml that provided settings."""
    environment: Environment = field(default_factory=Environment, repr=False)
    """The environment variables at creation time; they are not read again."""
    local_home: Path | None = None
    """The home of the local server, which is used, and started if necessary, when neither a server
    nor a key is configured. None disables this."""
    timeout_seconds: float = 60.0
    """How long to wait for one response."""
    connect_timeout_seconds: float = 5.0
    """How long to wait for a connection."""
    max_retries: int = 10
    """How often to retry a request that the server rejected for a temporary reason."""
    first_contact_seconds: float = 4.0
    """How long to retry while the server has never responded to this client."""
    first_answer_seconds: float = 10.0
    """How long to wait for the very first response after a connection was accepted."""
    outage_seconds: float = 300.0
    """How long to retry when a server that responded before has become unreachable."""
    poll_timeout_seconds: float | None = None
    """How long to wait for one result in total; None waits without limit."""
    poll_request_seconds: float = 45.0
    """How long one poll may take."""
    billing_pause_seconds: float | None = None
    """How long to wait when the account has a billing issue; None uses the server's value."""
    heartbeat_seconds: float = 10.0
    """The interval between heartbeats of a session."""
    max_connections: int = 512
    """The maximum number of connections to one server."""
    http_pool: str = "default"
    """Clients with the same pool name and server share connections."""
    max_concurrent_samples: int = 400
    """The maximum number of sample requests that are sent concurrently."""
    max_response_bytes: int = MAX_RESPONSE_BYTES
    """The largest response to read into memory, after decompression."""
    max_unsized_download_bytes: int = MAX_UNSIZED_DOWNLOAD_BYTES
    """The maximum number of bytes a download may write for files whose size is declared neither
    by the response nor by a manifest."""
    user_metadata: Mapping[str, str] | None = None
    """Attached to new sessions."""
    project_id: str | None = None
    """The project new sessions belong to."""
    tags: tuple[str, ...] = ()
    """Tags of new sessions."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Extra headers for every request."""
    telemetry: bool = False
    """Send usage events to the server. Off by default."""
    tokenizer_loader: Callable[[str], Any] | None = None
    """Loads a tokenizer by its id; the default uses transformers."""
    event_hook: Callable[[Any], None] | None = None
    """Called with each Timing, RequestDone or QueueChanged event, on a separate thread."""

    @classmethod
    def new(cls, *, environ: Mapping[str, str] | None = None, **options: Any) -> Config:
        """Create a config: options override the environment, which overrides the defaults.

        A profile passed as an option overrides the environment too; any other profile ranks below
        it. An option that is None or empty counts as not given.
        """
        known = {row.name for row in fields(cls)}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise ConfigError(_explain_unknown(unknown[0], known))
        env = options.get("environment") or read_environment(environ)
        given = {name: value for name, value in options.items() if value not in (None, "")}
        profile = find_profile(given.pop("profile", None), env)
        settings = _merge_profile(env, given, profile)
        if "base_url" not in settings and env.home != Path():
            settings["local_home"] = env.home
        return cls(**settings | given)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", normalise_url(self.base_url))
        # Copies: the caller may change its own dict or list later.
        object.__setattr__(self, "headers", dict(self.headers))
        object.__setattr__(self, "tags", _checked_tags(self.tags))
        for name in _POSITIVE_FIELDS:
            _check_number(name, getattr(self, name), least=0.0, inclusive=False)
        for name in _NON_NEGATIVE_FIELDS:
            _check_number(name, getattr(self, name), least=0.0, inclusive=True)
        if self.poll_timeout_seconds is not None:
            _check_number("poll_timeout_seconds", self.poll_timeout_seconds, 0.0, inclusive=False)
        for name in _INTEGER_FIELDS:
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"{name} must be an integer, got {getattr(self, name)!r}")
        if self.billing_pause_seconds is not None:
            _check_number("billing_pause_seconds", self.billing_pause_seconds, 0.0, inclusive=True)
        if self.user_metadata is not None:
            _check_metadata(self.user_metadata)
            object.__setattr__(self, "user_metadata", dict(self.user_metadata))

    def evolve(self, **changes: Any) -> Config:
        """Return a copy with some settings changed."""
        return replace(self, **changes)


_POSITIVE_FIELDS = (
    "timeout_seconds",
    "connect_timeout_seconds",
    "first_answer_seconds",
    "poll_request_seconds",
    "heartbeat_seconds",
    "max_connections",
    "max_concurrent_samples",
    "max_response_bytes",
    "max_unsized_download_bytes",
)
_INTEGER_FIELDS = (
    "max_retries",
    "max_connections",
    "max_concurrent_samples",
    "max_response_bytes",
    "max_unsized_download_bytes",
)
_NON_NEGATIVE_FIELDS = ("max_retries", "first_contact_seconds", "outage_seconds")


def _from_environment(env: Environment) -> dict[str, object]:
    settings: dict[str, object] = {
        "api_key": env.api_key,
        "base_url": env.base_url,
        "project_id": env.project_id,
        "tags": env.tags,
        "telemetry": env.telemetry,
        "max_unsized_download_bytes": env.max_unsized_download_bytes,
        "environment": env,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _merge_profile(
    env: Environment, options: dict[str, object], profile: Profile | None
) -> dict[str, Any]:
    """Combine the settings of the environment, the options and a profile."""
    from_environment = _from_environment(env)
    if profile is None:
        return from_environment | options
    settings: dict[str, object] = {**profile.settings}
    if not profile.is_explicit:
        url = options.get("base_url") or from_environment.get("base_url")
        is_other_server = url is not None and url != settings.get("base_url")
        # The caller did not choose this profile: its key must not be sent to another server, and
        # must not override a credential command.
        if is_other_server or env.credential_command:
            settings.pop("api_key", None)
        settings = {name: value for name, value in settings.items() if name not in from_environment}
    if "api_key" in settings and "api_key" not in options:
        settings["key_source"] = f"profile {profile.name!r} in {profile.path}"
    return from_environment | settings | options | {"profile": profile.name}


def normalise_url(url: str) -> str:
    """Return a base URL without trailing slash and with scheme and host in lower case."""
    text = str(url).strip()
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"base_url is not a valid URL: {text!r} ({error})") from error
    if parts.username is not None or parts.password is not None:
        # The message does not quote the URL: it contains a secret.
        raise ConfigError("base_url must not contain a user name or password; pass api_key=...")
    is_printable = all(" " < letter != "\x7f" for letter in text)
    if parts.scheme.lower() not in {"http", "https"} or not host or not is_printable:
        raise ConfigError(
            f"base_url must look like https://host[:port][/prefix], got {str(url)!r}",
            hint="Pass base_url=..., or set TINKER_BASE_URL.",
        )
    if parts.query or parts.fragment:
        raise ConfigError(f"base_url must not have a query or a fragment, got {str(url)!r}")
    if port == 0:
        raise ConfigError(f"base_url has an invalid port: {str(url)!r}")
    shown_host = f"[{host}]" if ":" in host else host
    shown_port = "" if port is None else f":{port}"
    return f"{parts.scheme.lower()}://{shown_host}{shown_port}{parts.path.rstrip('/')}"


def _check_number(name: str, value: object, least: float, *, inclusive: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and (value > least or (inclusive and value == least)):  # type: ignore[arg-type, operator]
        return
    bound = "at least" if inclusive else "more than"
    raise ConfigError(f"{name} must be {bound} {least:g}, got {value!r}")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"user_metadata must map strings to strings, got {key!r}: {value!r}")


def _checked_tags(tags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise ConfigError(f"tags must be a list of strings, got {tags!r}")
    return tuple(tags)


def _explain_unknown(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
    return f"Unknown Config setting {name!r}; {advice}"
