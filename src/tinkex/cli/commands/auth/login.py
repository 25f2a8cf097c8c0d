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
    from tinkex.cli.commands.auth.target import ProfileTarget
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
    from tinkex.cli.commands.auth.profile_file import store_key
    from tinkex.cli.commands.auth.target import check_profile_server, find_profile_target

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
    from tinkex.cli.ask import call_endpoint, fetch_api_key_info
    from tinkex.cli.client import rest_client
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
    from tinkex.cli.commands.auth.owners import parse_key_owner
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
