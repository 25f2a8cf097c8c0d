"""`tinkex auth login` and `logout`: store and delete the API key of a profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError
from tinkex.cli.options import Command

if TYPE_CHECKING:
    from tinkex.cli.commands.auth.profile_file import ProfileTarget
    from tinkex.client.profiles import ProfileSettings
    from tinkex.wire.messages import ApiKeyReply

_STDIN_HINT = "Pass it on stdin: tinkex auth login --api-key-stdin < FILE"


@click.command(cls=Command)
@click.option("--api-key-stdin", is_flag=True, help="Read the key from stdin without a prompt.")
@click.option("--default", "is_default", is_flag=True, help="Make this profile the default.")
@pass_context
def login(context: Context, api_key_stdin: bool, is_default: bool) -> None:
    """Verify an API key and store it.

    Key and server are stored in a profile of ~/.tinkex/config.toml, which only you can read: the
    one given with --profile, or the default one. The first profile becomes the default. --base-url
    selects the server; without it, the server of the profile, TINKER_BASE_URL or the hosted service
    is used.
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
        raise CliError("stdin is not a terminal, so the key cannot be prompted for", _STDIN_HINT)
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
    """Verify a key on the server and return its owner, if the server reports one."""
    from tinkex.cli.client import call_endpoint, fetch_api_key_info, rest_client
    from tinkex.errors import AuthenticationError
    from tinkex.wire.endpoints import CAPABILITIES

    # Ignore profiles and stored keys, so that only the new key is tested.
    clean_environment = target.environment._replace(
        home=Path(), profile=None, credential_command=None
    )
    key_context = context._replace(profile=None, api_key=key, base_url=target.base_url)
    try:
        with rest_client(
            key_context, environment=clean_environment, key_source="the prompt"
        ) as client:
            owner = fetch_api_key_info(client)
            if owner is None:
                call_endpoint(client, CAPABILITIES)
    except AuthenticationError as error:
        raise CliError(
            f"{target.base_url} rejected this key, so it was not stored",
            "Copy the key again without surrounding text, or select its server with --base-url.",
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
    data: dict[str, object] = {"profile": target.name, "path": path, "base_url": target.base_url}
    data |= {"default": is_default} | who.to_dict() | ({"warning": warning} if warning else {})
    name = f" as {who.description}" if who.description else ""
    sentence = (
        f"Logged in to {target.base_url}{name}. The key is in profile {target.name!r}, {path}"
    )
    announce(context, f"{sentence}\nWarning: {warning}" if warning else sentence, data)


def _find_override(target: ProfileTarget, is_default: bool) -> str | None:
    """Return why the stored key will not be used; None if it will."""
    environment = target.environment
    if environment.api_key or environment.credential_command:
        name = environment.api_key_variable if environment.api_key else "TINKER_CREDENTIAL_CMD"
        return f"{name} is set and takes precedence over the default profile; unset it"
    used = environment.profile or (target.name if is_default else target.file.default)
    if used not in {None, target.name}:
        return f"profile {used!r} is the default; pass --profile {target.name} to use this one"
    return None


@click.command(cls=Command)
@click.option("--revoke", is_flag=True, help="Also revoke the key on the server.")
@click.option("--all", "is_all", is_flag=True, help="Delete the keys of all profiles.")
@pass_context
def logout(context: Context, revoke: bool, is_all: bool) -> None:
    """Delete a stored API key.

    Deletes the key of --profile or of the default profile; if that has none, the key stored by
    `tinker auth login`. The profile keeps its server but is no longer the default: unless another
    server is configured, commands use the local server again.
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
        f"Deleted the key of profile {shown}; it {what}. {_describe_next_server(context)}".rstrip(),
        {"profiles": names, "path": target.file.path, "revoked": revoke},
    )


def _describe_next_server(context: Context) -> str:
    """Describe the server that the next command uses."""
    from tinkex.cli.client import find_access

    access = find_access(context._replace(profile=None, api_key=None))
    if access.home is not None:
        return "Commands use the local server again."
    return f"Commands use {access.base_url}."


def _remove_official_key(context: Context, target: ProfileTarget, revoke: bool) -> None:
    """Delete the key stored by the official CLI."""
    from tinkex.cli.output import announce
    from tinkex.client.credentials import CredentialStore

    path = target.environment.credentials_file
    store = CredentialStore(path)
    stored = store.read()
    record = stored.default_record
    if record is None or stored.default is None or context.profile:
        raise CliError(
            f"not logged in: profile {target.name!r} has no key",
            "`tinkex auth status` shows which key is used and its origin.",
        )
    if revoke:
        _revoke_key(context, target, {"api_key": record.key})
    store.remove(stored.default)
    what = "was revoked" if revoke else "is still valid on the server"
    announce(
        context,
        f"Deleted the key {record.name!r} in {path}; it {what}.",
        {"profiles": [], "key_name": record.name, "path": path, "revoked": revoke},
    )


def _revoke_key(context: Context, target: ProfileTarget, settings: ProfileSettings) -> None:
    from tinkex.cli.client import call_endpoint, rest_client
    from tinkex.wire.endpoints import DELETE_API_KEY

    url = context.base_url or settings.get("base_url") or target.base_url
    clean_environment = target.environment._replace(
        home=Path(), profile=None, credential_command=None
    )
    key_context = context._replace(profile=None, api_key=settings["api_key"], base_url=url)
    with rest_client(
        key_context, environment=clean_environment, key_source=str(target.file.path)
    ) as client:
        call_endpoint(client, DELETE_API_KEY)
