"""`tinkex auth login`: a key goes into a profile once the server has taken it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError
from tinkex.cli.options import Command

if TYPE_CHECKING:
    from tinkex.cli.commands.auth.profile_file import ProfileTarget
    from tinkex.wire.messages import ApiKeyReply

_STDIN_HINT = "Pass it through a pipe: tinkex auth login --api-key-stdin < FILE"


@click.command(cls=Command)
@click.option("--api-key-stdin", is_flag=True, help="Read the key from stdin and ask nothing.")
@click.option("--default", "is_default", is_flag=True, help="Use this profile if none is named.")
@pass_context
def login(context: Context, api_key_stdin: bool, is_default: bool) -> None:
    """Check a key with the server and store it.

    The key and the server go into a profile of ~/.tinkex/config.toml, which only you can read:
    the one of --profile, or the default one. The first profile becomes the default. --base-url
    names the server; without it that of the profile or of TINKER_BASE_URL is meant, or the hosted
    service.
    """
    from tinkex.cli.commands.auth.profile_file import (
        check_profile_server,
        find_profile_target,
        store_key,
    )

    target = find_profile_target(context)
    check_profile_server(context, target)
    key = context.api_key or (
        _read_key_from_stdin() if api_key_stdin else _prompt_for_key(context, target)
    )
    owner = _verify_key(context, target, key)
    is_first = target.file.default is None
    settings = {"base_url": target.base_url, "api_key": key}
    store_key(target.home, target.name, settings, is_default=is_default or is_first)
    _report_login(context, target, owner, is_default or target.file.default in {None, target.name})


def _read_key_from_stdin() -> str:
    text = "" if sys.stdin is None else sys.stdin.read()
    return _require_key(text)


def _prompt_for_key(context: Context, target: ProfileTarget) -> str:
    if not context.is_stdin_terminal:
        raise CliError("there is no terminal to ask for a key on", _STDIN_HINT)
    from getpass import getpass

    try:
        return _require_key(getpass(f"API key for {target.base_url}: ", sys.stderr))
    except EOFError:
        return _require_key("")


def _require_key(text: str) -> str:
    if not text.strip():
        raise CliError("no key was given, so nothing was stored", _STDIN_HINT)
    return text.strip()


def _verify_key(context: Context, target: ProfileTarget, key: str) -> ApiKeyReply | None:
    """Whose the key is; a server that does not know names is asked for something small."""
    from tinkex.cli.client import rest_client
    from tinkex.cli.raw_requests import call_endpoint, fetch_api_key_info
    from tinkex.errors import AuthenticationError
    from tinkex.wire.endpoints import CAPABILITIES

    # No profile and no stored key may stand beside the new one.
    alone = target.environment._replace(home=Path(), profile=None, credential_command=None)
    asking = context._replace(profile=None, api_key=key, base_url=target.base_url)
    try:
        with rest_client(asking, environment=alone, key_source="the prompt") as client:
            owner = fetch_api_key_info(client)
            if owner is None:
                call_endpoint(client, CAPABILITIES)
    except AuthenticationError as error:
        raise CliError(
            f"{target.base_url} refuses this key, so it was not stored",
            "Copy the key again, without anything around it; or name its server with --base-url.",
        ) from error
    return owner


def _report_login(
    context: Context, target: ProfileTarget, owner: ApiKeyReply | None, is_default: bool
) -> None:
    from tinkex.cli.commands.auth.status import parse_key_owner
    from tinkex.cli.output import announce

    who = parse_key_owner(owner)
    path = target.home.profiles_file
    warning = _find_override(target, is_default)
    data: dict[str, Any] = {"profile": target.name, "path": path, "base_url": target.base_url}
    data |= {"default": is_default} | who.to_dict() | ({"warning": warning} if warning else {})
    name = f" as {who.description}" if who.description else ""
    sentence = (
        f"Logged in to {target.base_url}{name}. The key is in profile {target.name!r}, {path}"
    )
    announce(context, f"{sentence}\nWarning: {warning}" if warning else sentence, data)


def _find_override(target: ProfileTarget, is_default: bool) -> str | None:
    """Why the key that was stored would not be the one that is used."""
    environment = target.environment
    if environment.api_key or environment.credential_command:
        name = environment.api_key_variable if environment.api_key else "TINKER_CREDENTIAL_CMD"
        return f"{name} is set and goes before a profile that is not named; unset it"
    used = environment.profile or (target.name if is_default else target.file.default)
    if used not in {None, target.name}:
        return f"profile {used!r} is the default; pass --profile {target.name} to use this one"
    return None


@click.command(cls=Command)
@click.option("--revoke", is_flag=True, help="Also have the server refuse the key from now on.")
@click.option("--all", "is_all", is_flag=True, help="Forget the keys of all profiles.")
@pass_context
def logout(context: Context, revoke: bool, is_all: bool) -> None:
    """Forget a stored key.

    The key of --profile, or of the default profile; if that has none, the one that
    `tinker auth login` has stored. The profile and its server stay, but it is not the default any
    more: without another server, commands use the server of this machine again.
    """
    from tinkex.cli.commands.auth.profile_file import drop_key, find_profile_target
    from tinkex.cli.output import announce

    target = find_profile_target(context)
    names = [target.name] if not is_all else sorted(target.file.profiles)
    names = [name for name in names if "api_key" in target.file.profiles.get(name, {})]
    if not names:
        _remove_official_key(context, target, revoke)
        return
    for name in names:
        if revoke:
            _revoke_key(context, target, target.file.profiles[name])
        drop_key(target.home, name)
    shown = ", ".join(map(repr, names))
    what = "was revoked" if revoke else "is still valid on the server"
    announce(
        context,
        f"Forgot the key of profile {shown}; it {what}. {_describe_next_server(context)}".rstrip(),
        {"profiles": names, "path": target.file.path, "revoked": revoke},
    )


def _describe_next_server(context: Context) -> str:
    """Which server the next command uses."""
    from tinkex.cli.access import find_access

    access = find_access(context._replace(profile=None, api_key=None))
    if access.home is not None:
        return "Commands use the server of this machine again."
    return f"Commands use {access.base_url}."


def _remove_official_key(context: Context, target: ProfileTarget, revoke: bool) -> None:
    """Forget the key that the official command line has stored."""
    from tinkex.cli.output import announce
    from tinkex.client.credentials import CredentialStore

    path = target.environment.credentials_file
    store = CredentialStore(path)
    stored = store.read()
    record = stored.default_record
    if record is None or stored.default is None or context.profile:
        raise CliError(
            f"there is nothing to log out from: profile {target.name!r} has no key",
            "`tinkex auth status` says which key is used, and where it comes from.",
        )
    if revoke:
        _revoke_key(context, target, {"api_key": record.key})
    store.remove(stored.default)
    what = "was revoked" if revoke else "is still valid on the server"
    announce(
        context,
        f"Forgot the key {record.name!r} in {path}; it {what}.",
        {"profiles": [], "key_name": record.name, "path": path, "revoked": revoke},
    )


def _revoke_key(context: Context, target: ProfileTarget, settings: Any) -> None:
    from tinkex.cli.client import rest_client
    from tinkex.cli.raw_requests import call_endpoint
    from tinkex.wire.endpoints import DELETE_API_KEY

    url = context.base_url or settings.get("base_url") or target.base_url
    alone = target.environment._replace(home=Path(), profile=None, credential_command=None)
    asking = context._replace(profile=None, api_key=settings["api_key"], base_url=url)
    with rest_client(asking, environment=alone, key_source=str(target.file.path)) as client:
        call_endpoint(client, DELETE_API_KEY)
