"""`tinkex config`: show the settings and their origin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import click

from tinkex.cli.client import DEFAULT_TIMEOUTS, ServerAccess, find_access
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Group
from tinkex.cli.output import Column, PropertiesOutput, TableOutput, show

if TYPE_CHECKING:
    from tinkex.client.profiles import Profile
    from tinkex.settings import Environment


@click.group(cls=Group)
def config() -> None:
    """Show the settings and their origin."""


@config.command("show")
@pass_context
def show_settings(context: Context) -> None:
    """List every setting with its value and origin; keys are masked.

    Order of precedence: command-line option, profile given with --profile, environment variable,
    default profile, built-in default.
    """
    from tinkex.client.profiles import read_profiles
    from tinkex.home import Home

    settings, environment = resolve_settings(context)
    file = read_profiles(Home(environment.home).profiles_file)
    # The title already contains the path of the file.
    rows = [
        {
            "name": row.name,
            "value": row.display_value(),
            "source": row.source.replace(f" in {file.path}", ""),
        }
        for row in settings
    ]
    data = {
        "settings": [row.to_dict() for row in settings],
        "path": file.path,
        "profiles": sorted(file.profiles),
        "default_profile": file.default,
    }
    profiles = ", ".join(sorted(file.profiles)) or "none"
    columns = {"name": Column("Setting"), "value": Column("Value"), "source": Column("From")}
    show(context, TableOutput(rows, columns, f"Profiles in {file.path}: {profiles}", data))


@config.command()
@pass_context
def path(context: Context) -> None:
    """Print the path of the profiles file."""
    from tinkex.home import Home
    from tinkex.settings import read_environment

    environment = read_environment()
    file = Home(environment.home).profiles_file
    if not context.is_json:
        click.echo(file)
        return
    data = {
        "path": file,
        "exists": file.is_file(),
        "home": environment.home,
        "credentials": environment.credentials_file,
    }
    show(context, PropertiesOutput(data))


DEFAULT = "default"
#: Environment variables of each setting; the first one that is set is used.
SETTING_VARIABLES = {
    "base_url": ("TINKEX_BASE_URL", "TINKER_BASE_URL"),
    "profile": ("TINKEX_PROFILE",),
    "project_id": ("TINKER_PROJECT_ID",),
    "tags": ("TINKER_TAGS",),
    "telemetry": ("TINKEX_TELEMETRY",),
    "home": ("TINKEX_HOME",),
    "log_level": ("TINKEX_LOG", "TINKER_LOG"),
    "credential_command": ("TINKER_CREDENTIAL_CMD",),
    "access_client_id": ("CLOUDFLARE_ACCESS_CLIENT_ID",),
    "access_client_secret": ("CLOUDFLARE_ACCESS_CLIENT_SECRET",),
}
_SETTING_FLAGS = {"base_url": "--base-url", "profile": "--profile", "timeout_seconds": "--timeout"}
#: Config fields without a row of their kind: callables, secrets and connection settings.
_OMITTED_FIELDS = frozenset(
    {"api_key", "key_source", "environment", "local_home", "headers", "base_url", "profile"}
    | {"tokenizer_loader", "event_hook"}
)
_ENVIRONMENT_FIELDS = ("home", "credentials_file", "log_level", "access_client_id")
_SECRET_FIELDS = ("credential_command", "access_client_secret")


class ResolvedSetting(NamedTuple):
    """A setting with its effective value and origin."""

    name: str
    value: object
    """The value; secrets are masked."""
    source: str

    def display_value(self) -> str:
        """Format the value for people."""
        if self.value in (None, ()):
            return "not set"
        if isinstance(self.value, list | tuple):
            return ", ".join(map(str, self.value))
        return f"{self.value:g}" if isinstance(self.value, float) else str(self.value)

    def to_dict(self) -> dict[str, object]:
        """The setting as JSON data."""
        return {"name": self.name, "value": self.value, "source": self.source}


def resolve_settings(context: Context) -> tuple[list[ResolvedSetting], Environment]:
    """Resolve every setting that a client in a script would use, plus the given options."""
    from dataclasses import fields

    from tinkex.client.config import Config
    from tinkex.client.profiles import find_profile
    from tinkex.settings import read_variables

    # None restores the defaults of scripts, which have longer timeouts than the CLI.
    access = find_access(context, **DEFAULT_TIMEOUTS)
    config, environment = access.config, access.config.environment
    profile = find_profile(context.profile, environment)
    names = [name for group in SETTING_VARIABLES.values() for name in group]
    given = {name for name in _SETTING_FLAGS if getattr(context, name) is not None}
    variables = read_variables(names)

    def source(name: str) -> str:
        return find_setting_origin(name, given, variables, profile)

    plain = [row.name for row in fields(Config) if row.name not in _OMITTED_FIELDS]
    settings = [
        *_connection_settings(access, source("base_url"), source("profile")),
        *(ResolvedSetting(name, getattr(config, name), source(name)) for name in plain),
        *(
            ResolvedSetting(name, getattr(environment, name), source(name))
            for name in _ENVIRONMENT_FIELDS
        ),
        *(
            ResolvedSetting(name, _mask_secret(environment, name), source(name))
            for name in _SECRET_FIELDS
        ),
    ]
    return settings, environment


def find_setting_origin(
    name: str,
    given: Collection[str],
    variables: Mapping[str, str],
    profile: Profile | None,
) -> str:
    """Return the origin of a setting, in Config's order of precedence."""
    if name in given:
        return _SETTING_FLAGS[name]
    in_profile = profile is not None and name in profile.settings
    origin = f"profile {profile.name!r}" if profile is not None else ""
    if in_profile and profile is not None and profile.is_explicit:
        return origin
    variable = next((key for key in SETTING_VARIABLES.get(name, ()) if key in variables), None)
    if variable is not None:
        return variable
    if name == "profile" and profile is not None:
        return f"default_profile in {profile.path}"
    return origin if in_profile else DEFAULT


def _connection_settings(
    access: ServerAccess, url_source: str, profile_source: str
) -> list[ResolvedSetting]:
    is_local = access.home is not None
    url = access.base_url or "started when it is needed"
    return [
        ResolvedSetting(
            "base_url", url, f"the local server of {access.home}" if is_local else url_source
        ),
        ResolvedSetting(
            "api_key",
            access.masked_key or ("printed by a command" if access.source else None),
            access.source or DEFAULT,
        ),
        ResolvedSetting("profile", access.config.profile, profile_source),
    ]


def _mask_secret(environment: Environment, name: str) -> str | None:
    return "***" if getattr(environment, name) else None
