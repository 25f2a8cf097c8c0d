"""`tinkex auth logout`: a stored key is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError
from tinkex.cli.options import Command

if TYPE_CHECKING:
    from tinkex.cli.commands.auth.target import ProfileTarget


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
    from tinkex.cli.commands.auth.profile_file import drop_key
    from tinkex.cli.commands.auth.target import find_profile_target
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
    from tinkex.cli.ask import call_endpoint
    from tinkex.cli.client import rest_client
    from tinkex.wire.endpoints import DELETE_API_KEY

    url = context.base_url or settings.get("base_url") or target.base_url
    alone = target.environment._replace(home=Path(), profile=None, credential_command=None)
    asking = context._replace(profile=None, api_key=settings["api_key"], base_url=url)
    with rest_client(asking, environment=alone, key_source=str(target.file.path)) as client:
        call_endpoint(client, DELETE_API_KEY)
