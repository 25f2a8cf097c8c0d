"""Environment variables and the installed version; no other module reads the environment."""

# No `from __future__ import annotations` here: NamedTuple would compile every annotation from text,
# which takes 5% of the start-up time of the command line.

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tinkex.errors import ConfigError

#: URL of the hosted service.
HOSTED_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
#: URL of the hosted console.
HOSTED_CONSOLE_URL = "https://tinker.thinkingmachines.ai"

_TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
_FALSE_WORDS = frozenset({"0", "false", "no", "off", ""})
_SECRET_FIELDS = frozenset({"api_key", "credential_command", "access_client_secret"})


class Environment(NamedTuple):
    """Settings from environment variables."""

    api_key: str | None = None
    """TINKER_API_KEY, or TINKEX_API_KEY which takes precedence: the API key."""
    api_key_variable: str = "TINKER_API_KEY"
    """The variable that the key came from."""
    base_url: str | None = None
    """TINKER_BASE_URL, or TINKEX_BASE_URL which takes precedence: the URL of the server."""
    credential_command: str | None = None
    """TINKER_CREDENTIAL_CMD: a shell command that prints a credential."""
    project_id: str | None = None
    """TINKER_PROJECT_ID: the project of new sessions."""
    tags: tuple[str, ...] = ()
    """TINKER_TAGS: comma-separated tags for new sessions."""
    log_level: str | None = None
    """TINKEX_LOG, or TINKER_LOG: debug, info, warning or error."""
    telemetry: bool = False
    """TINKEX_TELEMETRY: 1 sends usage events to the server; off by default."""
    access_client_id: str | None = None
    """CLOUDFLARE_ACCESS_CLIENT_ID: sent as CF-Access-Client-Id."""
    access_client_secret: str | None = None
    """CLOUDFLARE_ACCESS_CLIENT_SECRET: sent as CF-Access-Client-Secret."""
    credentials_file: Path = Path()
    """Where `auth login` stores keys: ~/.tinker/credentials.json."""
    home: Path = Path()
    """TINKEX_HOME: the state directory of the local server; ~/.tinkex by default."""
    profile: str | None = None
    """TINKEX_PROFILE: the profile in the home's config.toml."""
    deprecations: bool = False
    """TINKEX_DEPRECATIONS: 1 warns about names that are deprecated since SDK 0.38."""
    max_unsized_download_bytes: int | None = None
    """TINKEX_MAX_UNSIZED_DOWNLOAD_BYTES: limit for downloads of files without a size."""
    kernels: bool = True
    """TINKEX_KERNELS: off runs every tensor operation of the engine in torch."""

    def __repr__(self) -> str:
        # Secrets must not appear in tracebacks and logs.
        shown = {
            name: value for name, value in self._asdict().items() if name not in _SECRET_FIELDS
        }
        return f"Environment({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class TerminalSettings(NamedTuple):
    """Terminal settings from environment variables."""

    is_plain: bool = False
    """NO_COLOR is not empty, or TERM is dumb: no colors."""
    num_columns: int | None = None
    """COLUMNS: the width of the terminal, if set."""


def read_terminal(environ: Mapping[str, str] | None = None) -> TerminalSettings:
    """Read the terminal variables; invalid values count as unset."""
    env = os.environ if environ is None else environ
    columns = env.get("COLUMNS", "").strip()
    return TerminalSettings(
        is_plain=bool(env.get("NO_COLOR")) or env.get("TERM") == "dumb",
        num_columns=int(columns) if columns.isdecimal() and int(columns) > 0 else None,
    )


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read all variables of this package; empty ones count as unset."""
    env = os.environ if environ is None else environ
    user_home = Path(env.get("HOME") or Path.home())
    return Environment(
        api_key=_first_set(env, "TINKEX_API_KEY", "TINKER_API_KEY"),
        api_key_variable="TINKEX_API_KEY"
        if _first_set(env, "TINKEX_API_KEY")
        else "TINKER_API_KEY",
        base_url=_first_set(env, "TINKEX_BASE_URL", "TINKER_BASE_URL"),
        credential_command=_first_set(env, "TINKER_CREDENTIAL_CMD"),
        project_id=_first_set(env, "TINKER_PROJECT_ID"),
        tags=_parse_tags(env.get("TINKER_TAGS", "")),
        log_level=_check_log_level(_first_set(env, "TINKEX_LOG", "TINKER_LOG")),
        telemetry=_parse_flag(env, "TINKEX_TELEMETRY"),
        access_client_id=_first_set(env, "CLOUDFLARE_ACCESS_CLIENT_ID"),
        access_client_secret=_first_set(env, "CLOUDFLARE_ACCESS_CLIENT_SECRET"),
        credentials_file=user_home / ".tinker" / "credentials.json",
        home=_home_directory(_first_set(env, "TINKEX_HOME"), user_home),
        profile=_first_set(env, "TINKEX_PROFILE"),
        deprecations=_parse_flag(env, "TINKEX_DEPRECATIONS"),
        max_unsized_download_bytes=_parse_count(env, "TINKEX_MAX_UNSIZED_DOWNLOAD_BYTES"),
        kernels=_first_set(env, "TINKEX_KERNELS") is None or _parse_flag(env, "TINKEX_KERNELS"),
    )


def read_variables(
    names: Iterable[str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the named variables that are set; empty ones count as unset."""
    env = os.environ if environ is None else environ
    values = {name: _first_set(env, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def read_set_variables(
    names: Iterable[str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the named variables that are set, including empty ones, which may mean "none"."""
    env = os.environ if environ is None else environ
    return {name: env[name].strip() for name in names if name in env}


def child_environment(
    defaults: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a child process; set variables override the defaults."""
    return {**defaults, **(os.environ if environ is None else environ)}


def package_version() -> str:
    """Return the installed version of this package."""
    records = find_dist_info()
    if records is not None:
        return records.name.removeprefix("tinkex-").removesuffix(".dist-info")
    # Imported late: it loads the email parser and is rarely needed.
    from importlib.metadata import version

    return version("tinkex")


def find_dist_info() -> Path | None:
    """Return the .dist-info directory of this package, if it has one."""
    for directory in sys.path:
        try:
            names = os.listdir(directory or ".")  # noqa: PTH208 - a path object per file is slow
        except OSError:
            continue
        for name in names:
            if name.startswith("tinkex-") and name.endswith(".dist-info"):
                return Path(directory, name)
    return None


def _first_set(env: Mapping[str, str], *names: str) -> str | None:
    return next((env[name].strip() for name in names if env.get(name, "").strip()), None)


def _home_directory(text: str | None, user_home: Path) -> Path:
    if text is None:
        return user_home / ".tinkex"
    return expand_path(text)


def expand_path(path: str | Path) -> Path:
    """Return an absolute path with `~` expanded."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{str(path)!r}: the user has no home directory here") from None


def _check_log_level(text: str | None) -> str | None:
    if text is None:
        return None
    # Imported late: most commands do not need logging.
    from tinkex.logs import LEVELS

    if text.lower() not in LEVELS:
        raise ConfigError(
            f"TINKEX_LOG or TINKER_LOG must be one of {', '.join(LEVELS)}; got {text!r}"
        )
    return text


def _parse_tags(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag.strip() for tag in text.split(",") if tag.strip()))


def _parse_flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").strip()
    if text.lower() not in _TRUE_WORDS | _FALSE_WORDS:
        raise ConfigError(f"{name} must be 1, 0, true, false, yes, no, on or off; got {text!r}")
    return text.lower() in _TRUE_WORDS


def _parse_count(env: Mapping[str, str], name: str) -> int | None:
    text = _first_set(env, name)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) == 0:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {text!r:.80}")
    return int(text)
