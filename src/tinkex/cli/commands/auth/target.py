"""Which profile, and which server, `login` and `logout` are about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinkex.cli.context import Context
from tinkex.cli.errors import CliError
from tinkex.client.config import normalise_url
from tinkex.client.profiles import ProfilesFile, read_profiles
from tinkex.home import Home
from tinkex.settings import HOSTED_BASE_URL, Environment, read_environment

#: The profile that is made when none is named.
DEFAULT_PROFILE_NAME = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTarget:
    """A profile, there or to be made."""

    name: str
    base_url: str
    """The server that it is for, or will be."""
    settings: Mapping[str, Any] = field(repr=False)
    """What it says already."""
    file: ProfilesFile
    home: Home
    environment: Environment = field(repr=False)


def find_profile_target(context: Context) -> ProfileTarget:
    """The profile that was named, that is used without a name, or the first one there will be."""
    environment = read_environment()
    home = Home(environment.home)
    file = read_profiles(home.profiles_file)
    name = context.profile or environment.profile or file.default or DEFAULT_PROFILE_NAME
    settings = file.profiles.get(name, {})
    own, around = settings.get("base_url"), environment.base_url
    # A profile that the caller named goes before the variable, as in every other command.
    found = (own or around) if context.profile else (around or own)
    return ProfileTarget(
        name=name,
        base_url=normalise_url(context.base_url or found or HOSTED_BASE_URL),
        settings=settings,
        file=file,
        home=home,
        environment=environment,
    )


def check_profile_server(context: Context, target: ProfileTarget) -> None:
    """Refuse to turn a profile that nobody named into one of another server."""
    own = target.settings.get("base_url")
    if context.profile or own is None or normalise_url(own) == target.base_url:
        return
    raise CliError(
        f"profile {target.name!r} is for {own}, not for {target.base_url}",
        "Pass --profile NAME: a new name keeps both, the same name replaces it.",
    )
